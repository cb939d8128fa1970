"""Times decode attention of well-known libraries, for comparison with ours.

    python3 bench/cuda_attention_peer.py [--batch 64] [--tokens 32768]
        [--kv-heads 8] [--head-dim 128] [--group 4] [--seconds 1]

Every library that can be imported decodes one token of each sequence over the
same f16 K and V: torch's scaled_dot_product_attention and, if installed,
flash_attn (flash_attn_with_kvcache) and flashinfer (its paged decode). Prints a
line for each: the bytes of K and V by the time of the median call. The first
line is the device's read bandwidth, measured by a reduction of K. Ours are the
rows "decode over ..." of the CUDA suite of bench/.
"""

import argparse
import importlib.util
import math
import statistics
import sys

PAGE = 16  # Tokens.


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    return parser.parse_args()


def median_seconds(torch, call, seconds):
    """The median of calls that take `seconds` in all, at least 5 calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    while len(times) < 5 or sum(times) < seconds:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def sdpa(torch, args, query, key, value):
    """Uses [batch, heads, 1, head_dim], K and V [batch, heads, tokens, ...]."""
    heads_first = [rows.transpose(1, 2) for rows in (query, key, value)]

    def call():
        return torch.nn.functional.scaled_dot_product_attention(
            *heads_first, enable_gqa=True
        ).transpose(1, 2)

    return call


def flash_attn(torch, args, query, key, value):
    import flash_attn as library

    lengths = torch.full(
        (args.batch,), args.tokens, dtype=torch.int32, device="cuda"
    )
    return lambda: library.flash_attn_with_kvcache(
        query, key, value, cache_seqlens=lengths
    )


def flashinfer(torch, args, query, key, value):
    import flashinfer as library

    def ints(numbers):
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    pages = args.tokens // PAGE
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    wrapper.plan(
        ints([i * pages for i in range(args.batch + 1)]),
        torch.arange(args.batch * pages, dtype=torch.int32, device="cuda"),
        ints([PAGE] * args.batch),
        args.kv_heads * args.group,
        args.kv_heads,
        args.head_dim,
        PAGE,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
    )
    shape = (args.batch * pages, PAGE, args.kv_heads, args.head_dim)
    paged = (key.view(shape), value.view(shape))
    return lambda: wrapper.run(query[:, 0], paged)[:, None]


def main():
    args = parse()
    if importlib.util.find_spec("torch") is None:
        sys.exit("cuda_attention_peer: there is no torch: pip install torch")
    import torch

    if not torch.cuda.is_available():
        sys.exit("cuda_attention_peer: torch finds no CUDA device")
    if args.tokens % PAGE != 0:
        sys.exit(f"cuda_attention_peer: --tokens is not a multiple of {PAGE}")

    torch.manual_seed(1)
    shape = (args.batch, args.tokens, args.kv_heads, args.head_dim)
    half = {"dtype": torch.float16, "device": "cuda"}
    query = torch.randn(
        args.batch, 1, args.kv_heads * args.group, args.head_dim, **half
    )
    key = torch.randn(shape, **half)
    value = torch.randn(shape, **half)
    size = 2 * key.numel() * key.element_size()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: "
        f"batch {args.batch}, {args.tokens} tokens, {args.kv_heads} KV heads "
        f"of {args.head_dim}, group {args.group}, f16, {size / 1e9:.2f} GB"
    )

    def report(name, call, read):
        seconds = median_seconds(torch, call, args.seconds)
        rate = read / seconds
        print(f"{name:12} {seconds * 1e3:9.3f} ms  {rate / 1e12:6.3f} TB/s")

    # Rows are as long as possible, so that almost nothing is written.
    report("read", lambda: key.view(1024, -1).amax(dim=1), size // 2)
    # The expected result of the first sequence, to check the libraries.
    one = [rows[:1].float().transpose(1, 2) for rows in (query, key, value)]
    wide = [rows.repeat_interleave(args.group, dim=1) for rows in one[1:]]
    weights = torch.softmax(
        one[0] @ wide[0].transpose(2, 3) / math.sqrt(args.head_dim), dim=-1
    )
    expected = (weights @ wide[1]).transpose(1, 2)
    del one, wide, weights

    for library in (sdpa, flash_attn, flashinfer):
        name = library.__name__
        try:
            call = library(torch, args, query, key, value)
            apart = (call()[:1].float() - expected).abs().max().item()
            # Weighted means of normal numbers, rounded to f16.
            if not apart < 1e-2:
                print(f"{name:12} is wrong by {apart}: not timed")
                continue
            report(name, call, size)
        except ImportError as error:
            print(f"{name:12} is not there: {error}")
        # An error of one library; the others still run.
        except Exception as error:
            print(f"{name:12} failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
