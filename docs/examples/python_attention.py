"""Attention over a cache of kvtwin (docs/python.md):

    python docs/examples/python_attention.py
"""

import numpy as np

import kvtwin

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 64


def main():
    cache = kvtwin.Cache(kvtwin.Setup(capacity=64, max_batch=16, dtype="f16"))
    attention = kvtwin.Attention()
    random = np.random.default_rng(1)

    def rows(tokens, heads):  # The projections of a model.
        return random.standard_normal((tokens, heads, HEAD_DIM), np.float32)

    position = 0
    for tokens in (12, 1, 1):  # A prompt, and two tokens after it.
        cache.start_forward([*range(position, position + tokens)], [0] * tokens)
        for layer in range(LAYERS):
            cache.put(layer, rows(tokens, KV_HEADS), rows(tokens, KV_HEADS))
            view = cache.get(layer)
            if layer == 0:
                attention.plan(view.mask, tokens)  # One plan serves all layers.
            query = rows(tokens, HEADS)
            out = attention.attend(query, view, scale=HEAD_DIM**-0.5).out
            print(f"position {position}, layer {layer}: {out.shape}")
        position += tokens


if __name__ == "__main__":
    main()
