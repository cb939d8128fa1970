#!/usr/bin/env python3
"""A toy KV cache that answers calls as a recording (docs/adapter.md):

    kvtwin gen --ops 10000 | python3 toy_cache.py | kvtwin check -

It keeps tokens in a list, so its placement is "other". With --bug it forgets
the last token of each prefix that it copies.
"""

import json
import sys

OPEN_END = 2147483647
IN_A_PASS = ("put", "get", "set_causal", "reserved_mask")


class Token:
    def __init__(self, position, sequence):
        self.position = position
        self.sequences = {sequence}
        self.rows = {}  # By layer: K and V, as lists.


class Cache:
    def __init__(self, header, bug):
        cache, init, model = header["cache"], header["init"], header["model"]
        self.bug = bug
        self.shift = cache["shift"]
        self.chunk = cache.get("chunk")
        self.cells = init["max_sequences"] * init["capacity"]
        self.heads = model["kv_heads"]
        self.k_dim, self.v_dim = model["k_head_dim"], model["v_head_dim"]
        self.mask_padding = header["config"]["mask_batch_padding"]
        self.tokens = []
        self.batch = []

    def of(self, sequence):
        return [t for t in self.tokens if sequence in t.sequences]

    def leave(self, sequence, tokens):
        for token in tokens:
            token.sequences.discard(sequence)
        self.tokens = [t for t in self.tokens if t.sequences]

    def start_forward(self, op):
        pairs = list(zip(op["positions"], op["sequences"]))
        self.batch, self.excepted = [], set()
        self.reserving = op.get("reserve", False)
        room = self.cells - len(self.tokens)
        if len(pairs) > room and not self.reserving:
            return {"result": "cache_full"}
        self.batch = [Token(p, s) for p, s in pairs]
        self.asked = pairs
        if not self.reserving:
            self.tokens += self.batch
        return {"result": "ok"}

    def set_causal(self, op):
        self.excepted = set(op["except"])
        return {}

    def put(self, op):
        for i, token in enumerate(self.batch):
            k, v = self.heads * self.k_dim, self.heads * self.v_dim
            token.rows[op["layer"]] = (op["key"]["data"][i * k:(i + 1) * k],
                                       op["value"]["data"][i * v:(i + 1) * v])
        return {}

    def sees(self, row, token):
        position, sequence = self.asked[row]
        if sequence not in token.sequences:
            return False
        if token.position > position and row not in self.excepted:
            return False
        chunk = self.chunk or position + 1
        return token.position >= position - position % chunk

    def get(self, op):
        zeros = ([0] * self.heads * self.k_dim, [0] * self.heads * self.v_dim)
        rows = [t.rows.get(op["layer"], zeros) for t in self.tokens] or [zeros]
        mask = ["".join("01"[self.sees(i, t)] for t in self.tokens) or "0"
                for i in range(len(self.asked))]
        while len(mask) % self.mask_padding:
            mask.append("0" * len(rows))
        return {
            "key": {"shape": [self.k_dim, self.heads, len(rows)],
                    "data": [x for k, _ in rows for x in k]},
            "value": {"shape": [self.v_dim, self.heads, len(rows)],
                      "data": [x for _, v in rows for x in v]},
            "mask": {"shape": [len(rows), len(mask)], "rows": mask}}

    def reserved_mask(self, _):
        return {"shape": [self.cells, len(self.asked)]}

    def copy_prefix(self, op):
        length = op["len"] - (1 if self.bug else 0)
        copied = [t for t in self.of(op["src"]) if t.position < length]
        self.leave(op["dst"], set(self.of(op["dst"])) - set(copied))
        for token in copied:
            token.sequences.add(op["dst"])
        return {}

    def can_resume(self, _):
        return {"result": True}  # Nothing is ever forgotten.

    def remove(self, op):
        begin, end = op["begin"], op["end"]
        held = self.of(op["seq"])
        gone = [t for t in held if begin <= t.position < end]
        later = [t for t in held if t.position >= end != OPEN_END]
        if end == OPEN_END:
            gone = [t for t in held if t.position >= begin]
        elif any(len(t.sequences) > 1 for t in later):
            return {"result": "shared_cells"}
        elif self.shift == "none" and len(gone) < len(held):
            return {"result": "not_supported"}
        self.leave(op["seq"], gone)
        for token in later:
            token.position -= end - begin
            for key, _ in token.rows.values():
                for i in range(len(key)):
                    moves = self.shift == "add" or (
                        self.shift == "tag_add" and i % self.k_dim)
                    key[i] += begin - end if moves else 0
        return {"result": "ok"}


def supported(header):
    return (header["cache"]["type"] in ("causal", "chunked")
            and header["cache"]["shift"] != "rope"
            and header["init"]["dtype"] == "f32"
            and header["config"].get("v_dtype", "f32") == "f32"
            and not header["config"]["permuted_v"]
            and not header["config"].get("tiled_v"))


def main():
    cache = None
    for line in sys.stdin:
        op = json.loads(line)
        if "kvtrace" in op:  # Unsupported caches are left out.
            cache = Cache(op, "--bug" in sys.argv) if supported(op) else None
            op.update(placement="other", producer="toy_cache.py")
            answer = {}
        elif cache is None or (not cache.batch and op["op"] in IN_A_PASS):
            continue  # The cache is left out, or start_forward was refused.
        else:
            answer = getattr(cache, op["op"])(op)
        if cache is not None:
            print(json.dumps({**op, **answer}))


main()
