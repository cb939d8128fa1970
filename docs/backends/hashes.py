"""Hashes that stand for the rows of tokens."""

import zlib

MASK = (1 << 62) - 1


def mix(*parts):
    value = 0x9E3779B97F4A7C15
    for part in parts:
        if isinstance(part, str):
            part = zlib.crc32(part.encode())
        value = ((value ^ (part + 1)) * 0x100000001B3) & MASK
        value ^= value >> 29
    return value
