"""Writes codec.safetensors: E2M1 and E4M3 casts by ml_dtypes, exhaustive over bf16. See ../README.md."""

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

F32 = np.float32
E2M1_MAX = F32(6)
E4M3_MAX = F32(448)


def e2m1(x):
    """E2M1 code (sign << 3 | magnitude) of each f32: ties to the even code, saturating, NaN gives 7."""
    clamped = np.clip(x, -E2M1_MAX, E2M1_MAX)
    code = np.where(np.isnan(x), F32(0), clamped).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(7), code & np.uint8(15)).astype(np.uint8)


def e4m3(x):
    """E4M3FN byte of each f32, clamped to +-448 first; NaN gives 0x7F."""
    clamped = np.clip(x, -E4M3_MAX, E4M3_MAX)
    byte = np.where(np.isnan(x), F32(0), clamped).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), byte).astype(np.uint8)


def around(values):
    """Each value with its two f32 neighbours, in both signs."""
    v = np.asarray(values, dtype=F32)
    v = np.concatenate([v, np.nextafter(v, F32(-np.inf)), np.nextafter(v, F32(np.inf))])
    return np.concatenate([v, -v])


def midpoints(grid):
    """Halfway points of neighbours; exact in f32 for both grids."""
    g = np.asarray(grid, dtype=np.float64)
    mid = (g[1:] + g[:-1]) / 2
    assert (mid.astype(F32) == mid).all()
    return mid.astype(F32)


SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3.4028235e38, -3.4028235e38, 1.1754944e-38, 1e-45, -1e-45, 1e-40],
    dtype=F32,
)


def probe(grid, beyond, low, high, total, seed):
    """Grid values, ties, their neighbours, specials, and random values of 2^low to 2^high, `total` in all."""
    fixed = np.concatenate([SPECIAL, around(grid), around(midpoints(grid)), around(beyond)])
    rng = np.random.default_rng(seed)
    n = total - len(fixed)
    assert n > total // 4, n
    magnitude = np.exp2(rng.uniform(low, high, n)).astype(F32)
    return np.concatenate([fixed, np.where(rng.random(n) < 0.5, -magnitude, magnitude).astype(F32)])


def main():
    bf16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F32)
    e2m1_values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)
    e4m3_values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
    e4m3_input = probe(e4m3_values[:0x7F], [449, 463.9, 464, 480, 512, 1e6], -13, 10, 4096, 1)
    e2m1_input = probe(e2m1_values[:8], [6.5, 7, 8, 100, 2688, 1e30], -6, 4, 2048, 2)
    tensors = {
        "e2m1_from_bf16": e2m1(bf16),
        "e4m3_from_bf16": e4m3(bf16),
        "e2m1_to_f32": e2m1_values,
        "e4m3_to_f32": e4m3_values,
        "e4m3_from_f32.input": e4m3_input,
        "e4m3_from_f32.expected": e4m3(e4m3_input),
        "e2m1_from_f32.input": e2m1_input,
        "e2m1_from_f32.expected": e2m1(e2m1_input),
    }
    save_file(tensors, Path(__file__).with_name("codec.safetensors"), {"versions": f"ml_dtypes {ml_dtypes.__version__}"})


if __name__ == "__main__":
    main()
