"""Writes quantize.safetensors: small matrices in NVFP4, by the TE formula (numpy) and by torchao. See ../README.md."""

from pathlib import Path

import ml_dtypes
import numpy as np
from make_codec import e2m1, e4m3
from safetensors.numpy import save_file

F32 = np.float32
FLT_MAX = np.finfo(F32).max
RHT_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=F32)


def bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(F32)


def pack(codes):
    """Two codes a byte; the even column is the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def te_quantize(x, block_rows=1):
    """TransformerEngine's two-level NVFP4, every step one f32 rounding; returns packed codes, scale bytes, amax."""
    rows, cols = x.shape
    amax = np.abs(x).max()
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        encode = F32(1) if amax == 0 else min(F32(2688) / amax, FLT_MAX)
        tiles = np.abs(x).reshape(rows // block_rows, block_rows, cols // 16, 16)
        scales = e4m3(np.minimum(tiles.max(axis=(1, 3)) * (encode * (F32(1) / F32(6))), F32(448)))
        scale = scales.view(ml_dtypes.float8_e4m3fn).astype(F32)
        factor = np.minimum(F32(1) / (scale * (F32(1) / encode)), FLT_MAX)
        scaled = x * factor.repeat(block_rows, 0).repeat(16, 1)
    assert scaled.dtype == F32
    codes = e2m1(np.clip(scaled, F32(-6), F32(6)))
    return pack(codes), scales.repeat(block_rows, 0), np.array([amax], dtype=F32)


def rotate(x):
    """x @ (diag(S) H16 / 4) in each 16 columns: f32 butterflies at strides 1, 2, 4, 8, then times 0.25; zero is +0."""
    rows, cols = x.shape
    y = (x.reshape(-1, 16) * RHT_SIGNS).astype(x.dtype)
    for stride in (1, 2, 4, 8):
        pair = y.reshape(-1, 16 // (2 * stride), 2, stride)
        low, high = pair[:, :, 0], pair[:, :, 1]
        y = np.stack([low + high, low - high], axis=2).reshape(-1, 16)
    return (y * x.dtype.type(0.25) + x.dtype.type(0)).reshape(rows, cols)


def torchao_quantize(x, two_level):
    import torch
    from torchao.prototype.mx_formats import nvfp4_tensor as ao

    t = torch.from_numpy(x)
    pts = ao.per_tensor_amax_to_scale(t.abs().max()) if two_level else None
    scales, codes = ao.nvfp4_quantize(t, 16, pts)
    out = {"codes": codes.numpy(), "scales": scales.view(torch.uint8).numpy()}
    if two_level:
        out["pts"] = pts.reshape(1).numpy()
    return out


def near_miss(rng):
    """64 bf16 blocks, amax 2.1875, on which formulae close to TE's give another scale byte or another code."""
    amax = F32(2.1875)
    size = np.exp2(rng.uniform(-8, 0, (100_000, 1))).astype(F32)
    pool = bf16(rng.standard_normal((len(size), 16)).astype(F32) * size)
    pool = pool[np.abs(pool).max(1) < amax]
    encode = F32(2688) / amax
    top = np.abs(pool).max(1, keepdims=True)
    byte = e4m3(top * (encode * (F32(1) / F32(6))))
    scale = byte.view(ml_dtypes.float8_e4m3fn).astype(F32)
    codes = e2m1(pool * (F32(1) / (scale * (F32(1) / encode))))
    other_scale = [e4m3(top / F32(6) * encode), e4m3(top / F32(6) / (amax / F32(2688))), e4m3(top * encode / F32(6))]
    other_codes = [e2m1(pool * (encode / scale)), e2m1(pool / (scale / encode)), e2m1(pool * encode / scale)]
    picks = [np.flatnonzero((b != byte)[:, 0]) for b in other_scale]
    picks += [np.flatnonzero((c != codes).any(1)) for c in other_codes]
    print("near_miss: blocks told apart of", len(pool), [len(p) for p in picks])
    assert all(len(p) for p in picks)
    chosen = np.unique(np.concatenate([p[:12] for p in picks]))[:63]
    assert all(np.isin(p, chosen).any() for p in picks)
    rest = np.setdiff1d(np.arange(len(pool)), chosen)[: 63 - len(chosen)]
    blocks = pool[np.concatenate([chosen, rest])]
    first = np.zeros((1, 16), F32)
    first[0, 0] = amax
    return np.concatenate([first, blocks]).reshape(16, 64) + F32(0)


def cases():
    """Name to matrix. Those made with bf16() hold only bf16 values; no -0.0 outside `neg_zero`."""
    rng = np.random.default_rng(20)

    def normal(rows, cols, std=1.0):
        return rng.standard_normal((rows, cols)).astype(F32) * F32(std)

    out = {"gauss": bf16(normal(32, 64, 0.02)), "gauss_f32": normal(32, 64, 0.02)}
    out["mid_f32"] = normal(64, 64)

    # Multiples of 1/8 up to the block's own maximum of 6: with amax 6 most scaled values are exact ties or grid points.
    ties = rng.integers(-48, 49, (16, 64)).astype(F32) / F32(8)
    ties[:, ::16] = 6
    out["ties"] = bf16(ties + F32(0))

    out["near_miss"] = near_miss(rng)

    x = normal(48, 32, 0.02)
    hit = rng.random(x.shape) < 0.03
    out["outliers"] = bf16(np.where(hit, x * F32(300), x))
    out["outliers_f32"] = np.where(rng.random(x.shape) < 0.03, x * F32(1234.5), x).astype(F32)

    # Row r has magnitude about 2^-r: block scales run from 448 through the E4M3 subnormals to zero.
    ladder = np.exp2(-np.arange(32)).astype(F32)[:, None]
    out["rows_ladder"] = bf16(normal(32, 48) * ladder)
    out["rows_ladder_f32"] = normal(32, 48) * np.exp2(-np.arange(32) * 0.7).astype(F32)[:, None]
    # Dense cover of the subnormal scales (below 2^-6 of 448, i.e. block maxima near amax * 2^-15 and less).
    fine = normal(32, 48) * np.exp2(rng.uniform(-19, -13, (32, 1))).astype(F32)
    fine[0, 0] = 1
    out["subnormal_scales"] = bf16(fine)

    x = bf16(normal(16, 16))
    x[2:6] = 0
    x[6:10] *= F32(1e-30)
    out["zero_and_tiny"] = bf16(x)
    # Zero blocks next to live ones in both directions: 16x16 tiles (0,1) and (1,0) are zero.
    x = bf16(normal(32, 32))
    x[:16, 16:] = 0
    x[16:, :16] = 0
    out["zero_blocks"] = x
    out["all_tiny"] = bf16(normal(16, 16, 1e-30))
    out["all_zero"] = np.zeros((16, 32), F32)
    # 2688 / amax is above FLT_MAX: S clamps and 1/S is an f32 subnormal (a flush-to-zero device differs here).
    out["clamped_scale"] = bf16(normal(16, 32, 1e-37))
    out["huge"] = bf16(np.clip(normal(16, 32), -3, 3) * F32(1e38))
    out["ragged"] = bf16(normal(5, 32))
    out["ragged_f32"] = normal(7, 48, 3.0)
    x = bf16(normal(16, 32))
    x[:, ::5] = -0.0
    out["neg_zero"] = x
    return out


NO_RHT = {"huge", "clamped_scale"}  # sums that leave f32, and f32 subnormals that the oracle's bf16 product flushes
NO_TORCHAO_TWO_LEVEL = {"all_zero"}  # 0 / 0


def main():
    import torch
    import torchao

    tensors = {}
    for name, x in cases().items():
        assert x.dtype == F32 and np.isfinite(x).all(), name
        assert name == "neg_zero" or not (np.signbit(x) & (x == 0)).any(), name
        put = lambda key, value: tensors.update({f"{name}.{key}": np.ascontiguousarray(value)})

        def put_te(prefix, matrix, block_rows=1):
            for key, value in zip(("codes", "scales", "amax"), te_quantize(matrix, block_rows)):
                put(f"{prefix}.{key}", value)

        put("input", x)
        put_te("te", x)
        if len(x) % 16 == 0:
            put_te("te2d", x, 16)
        if name not in NO_RHT:
            rotated = rotate(x)
            put("rht.input", rotated)
            put_te("te_rht", bf16(rotated))
            exact = rotate(x.astype(np.float64))
            print(f"{name}: rotation exact {np.array_equal(rotated, exact)}, "
                  f"as bf16 {np.array_equal(bf16(rotated), exact.astype(ml_dtypes.bfloat16).astype(F32))}")
        for key, value in torchao_quantize(x, False).items():
            put(f"torchao1.{key}", value)
        if name not in NO_TORCHAO_TWO_LEVEL:
            for key, value in torchao_quantize(x, True).items():
                put(f"torchao.{key}", value)

    # One metadata key: their order in the file is not fixed.
    versions = f"torchao {torchao.__version__}, torch {torch.__version__}, ml_dtypes {ml_dtypes.__version__}"
    save_file(tensors, Path(__file__).with_name("quantize.safetensors"), {"versions": versions})


if __name__ == "__main__":
    main()
