"""The peers by their names, those of a process together, and what the page says
of them."""

from kvtwins import Kvtwin, KvtwinBf16, KvtwinF8, KvtwinF8Bf16
from paged import OpenVino, Sglang, Vllm
from peers import Ggml, OnnxRuntime, Torch, TorchFlex, TorchFolded

PROCESSES = [
    {"kvtwin": Kvtwin, "kvtwin, f8_e4m3": KvtwinF8,
     "kvtwin in bf16": KvtwinBf16, "kvtwin in bf16, f8_e4m3": KvtwinF8Bf16},
    {"torch, sdpa": Torch, "torch, sdpa, heads as rows": TorchFolded,
     "torch, flex_attention": TorchFlex},
    {"onnxruntime, GroupQueryAttention": OnnxRuntime},
    {"openvino, PagedAttention": OpenVino},
    {"vllm, cpu_attention": Vllm, "vllm, SGLang's kernels": Sglang},
    {"ggml, flash_attn_ext": Ggml},
]
PEERS = [name for peers in PROCESSES for name in peers]
DTYPES = ["f32", "f16", "bf16", "8-bit"]


def size_name(cells):
    return f"{cells // 1024}k"


def block(title, names, columns, values):
    """A table: a line for each name, a group of columns for each dtype. Above
    the cells of a column are its rows, if there are several."""
    width = 5 if len(columns) > 1 else 7
    lines = [title, " " * 33 + "".join(
        f"{dtype:>{width * len(columns)}}" for dtype in DTYPES)]
    heads = [[str(rows) for rows, _ in columns],
             [size_name(cells) for _, cells in columns]]
    for head in heads[columns[0][0] == 1:]:
        lines.append(" " * 33 + "".join(
            f"{text:>{width}}" for text in head * len(DTYPES)))
    for name in names:
        cells = [values.get((name, dtype, column), "")
                 for dtype in DTYPES for column in columns]
        lines.append(f"{name:33}" + "".join(
            f"{cell:>{width}}" for cell in cells))
    return [line.rstrip() for line in lines]


def share(row, limit):
    """In percent; empty if it has no such attention, > if it takes too long."""
    if "ns" in row:
        return f"{100 * row[limit]:.0f}"
    if row["reason"].startswith("left out"):
        return ">"
    return "!" if row["reason"].startswith("wrong") else ""


def tables(rows):
    """The text of the page."""
    lines = []
    shapes = sorted({(row["rows"] > 1, row["heads"], row["threads"])
                     for row in rows})
    for prefill, heads, threads in shapes:
        chosen = [row for row in rows if (row["rows"] > 1, row["heads"],
                                          row["threads"]) ==
                  (prefill, heads, threads)]
        limit, unit = (("limit_gigaflops", "GFLOP/s") if prefill else
                       ("limit_gigabytes", "GB/s"))
        low, high = (f(row[limit] for row in chosen) for f in (min, max))
        of = "multiply_share" if prefill else "read_share"

        columns = list(dict.fromkeys(
            (row["rows"], row["cells"]) for row in chosen))
        values = {(row["peer"], row["dtype"], (row["rows"], row["cells"])):
                  share(row, of) for row in chosen}
        number = "1 thread" if threads == 1 else f"{threads} threads"
        lines += block(
            f"{'prefill' if prefill else 'decode'}, {heads} heads on 8, "
            f"{number}: % of {low:.0f} to {high:.0f} {unit}",
            [name for name in PEERS if any(
                "ns" in row for row in chosen if row["peer"] == name)],
            columns, values) + [""]
    return lines[:-1]


def series(rows):
    """Lines for gnuplot: dtype, decode or prefill, peer, cells or case, share.
    With 32 heads and the most threads."""
    most = max(row["threads"] for row in rows)
    for row in rows:
        if "ns" not in row or (row["heads"], row["threads"]) != (32, most):
            continue
        prefill = row["rows"] > 1
        of = "multiply_share" if prefill else "read_share"
        place = f"{row['rows']}x{size_name(row['cells'])}" if prefill else (
            row["cells"])
        yield "\t".join([row["dtype"], "prefill" if prefill else "decode",
                         row["peer"], str(place), f"{100 * row[of]:.2f}"])
