"""Low-bit key codes: their bytes, the quantiser, and the bounds on what scan scores and skipped blocks can do."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import ffd_decode as op
from tests.kernels.ffd_cases import Oracle, bits_of, call, case, quantised, quick


def test_packing_round_trip_is_exact():
    rng = np.random.default_rng(0)
    for bits in (2, 4):
        round_trip = jax.jit(
            lambda c, bits=bits: (p := op.pack_codes(c, bits), op.unpack_codes(p, bits, c.shape[-1]))
        )
        for channels in (1, 4, 33):
            codes = rng.integers(0, 2**bits, (2, 5, channels))
            packed, unpacked = map(np.asarray, round_trip(codes))
            assert packed.shape[-1] == op.code_bytes(channels, bits) == math.ceil(channels * bits / 8)
            np.testing.assert_array_equal(bits_of(packed, bits, channels), codes)
            np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("bits", [2, 4])
def test_quantiser(bits):
    k = np.random.default_rng(0).normal(size=(2, 48, 9)).astype("f")
    k[..., 3] = 0
    k[0, :3, 0] = 3e4, -3e4, 1e4  # a residual that float8 could only hold as NaN
    quantise = jax.jit(op.quantize_blocks, static_argnums=(1, 2), static_argnames="residual_dtype")
    z = (2**bits - 1) / 2
    for kind in ("float32", "float8_e4m3fn"):
        code, scale, residual = map(np.asarray, quantise(k, 16, bits, residual_dtype=jnp.dtype(kind)))
        wanted = quantised(k, 16, bits, jnp.dtype(kind))
        np.testing.assert_array_equal(code, wanted[0])
        np.testing.assert_allclose(scale, wanted[1], rtol=1e-6)
        np.testing.assert_allclose(residual.astype(float), wanted[2].astype(float), rtol=0.13, atol=1e-2)
        assert np.isfinite(residual.astype(float)).all()
        split = k.reshape(2, 3, 16, 9).astype(float)
        levels = (bits_of(code, bits, 9).reshape(split.shape) - z) * scale.astype(float)[:, :, None]
        assert (np.abs(split - levels) <= scale[:, :, None] / 2 * (1 + 1e-5)).all()
        if kind == "float32":
            off = np.abs(levels + residual.reshape(split.shape) - split)
            assert (off <= 1e-6 + 1e-7 * scale[:, :, None]).all()
            base = op.dequantize(code.reshape(2, 3, 16, -1), scale, bits)
            np.testing.assert_allclose(base, levels, rtol=1e-6, atol=1e-6)


ALL = {"scale": 1 / 16, "delta": math.inf}


def test_every_float8_is_read_right_by_the_native_code():
    """Softmax weights of 256 keys whose residuals are all the numbers that there are, subnormal ones among them."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    number = np.isfinite(every.astype("f"))
    arrays = {
        "q": np.ones((1, 1, 1), "f"),
        "k_code": np.zeros((1, 1, 256, 1), np.uint8),
        "k_scale": np.zeros((1, 1, 1, 1), "f"),
        "k_resid": np.where(number, every, 0)[None, None, :, None],
        "v": np.eye(256, dtype="f")[None, None],
        "num_blocks": np.ones(1, np.int32),
    }
    out = np.asarray(call("cpu", arrays, ALL)[0], float)[0, 0]
    wanted = every.astype(float)[number]
    np.testing.assert_allclose(np.log(out[number] / out[0]) * 16, wanted, atol=2e-4, rtol=1e-6)
    spoiled = call("cpu", {**arrays, "k_resid": every[None, None, :, None]}, ALL)[0]
    assert np.isnan(spoiled).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_error_bounds_hold(bits):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        k = (rng.normal(size=(1, 2, 256, 32)) * np.exp(rng.normal(size=32))).astype("f")
        arrays = case(seed, batch=1, group=2, d=32, block=16, blocks=16, tail=0, counts=[16])
        cache = quantised(k, 16, bits, jnp.dtype("float8_e4m3fn"))
        arrays.update(zip(("k_code", "k_scale", "k_resid"), cache))
        oracle = Oracle(arrays, bits)
        true = k.reshape(1, 2, 16, 16, 32).astype(float)
        for h, n in np.ndindex(2, 16):  # (a) of a scan score
            scan, exact = (oracle.q[0, h] @ x[0, h, n].T for x in (oracle.base, true))
            assert (np.abs(scan - exact) <= oracle.bound(0, h, n)[:, None]).all()
        options = {"bits": bits, "delta": 1.0}
        out, stats = call(quick(), arrays, options)
        kept = np.asarray(stats.kept)
        full = oracle.attend(np.ones_like(kept))[0]
        mass = np.asarray(op.kept_mass(**arrays, **options), float)
        lse = [oracle.attend(x)[1] for x in (kept, np.ones_like(kept))]
        np.testing.assert_allclose(mass, np.exp(lse[0] - lse[1]), atol=1e-4)
        norms = np.linalg.norm(oracle.v, axis=-1).max(-1)[0]  # [H, NB]
        for h in range(4):  # (b) of the output, linear in the mass dropped
            of = norms[h // 2]
            most = of[kept[0, h // 2]].max() + of[~kept[0, h // 2]].max(initial=0)
            assert np.linalg.norm(np.asarray(out)[0, h] - full[0, h]) <= (1 - mass[0, h]) * most + 1e-4
        # (d) no key within δ of the largest of all is dropped, by its own score
        kept = np.asarray(call(quick(), arrays, {**options, "threshold": "certified"})[1].kept)
        for h, g in np.ndindex(2, 2):
            scores = oracle.q[0, h, g] @ true[0, h].reshape(-1, 32).T
            near = np.unique(np.flatnonzero(scores >= scores.max() - 1.0) // 16)
            assert kept[0, h, near].all()


def test_infinite_delta_is_dense_attention():
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 1, 2, 48, 32)).astype("f")
    q = rng.normal(size=(1, 4, 32)).astype("f")
    scores = (q.reshape(2, 2, 32) @ np.swapaxes(k[0], 1, 2)) / math.sqrt(32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    dense = (weights / weights.sum(-1, keepdims=True) @ v[0]).reshape(1, 4, 32)
    for bits, residual, most in (
        (2, "float32", 1e-5),
        (2, "float8_e4m3fn", 3e-2),
        (4, "float8_e4m3fn", 1e-2),
    ):
        cache = quantised(k, 16, bits, jnp.dtype(residual))
        arrays = {"q": q, **dict(zip(("k_code", "k_scale", "k_resid"), cache)), "v": v}
        out = call(quick(), arrays, {"bits": bits, "delta": math.inf})[0]
        assert np.abs(np.asarray(out) - dense).max() < most * np.abs(dense).max()


def test_delta_from_ratio():
    assert op.delta_from_ratio(math.exp(-3)) == pytest.approx(3)
    with pytest.raises(ValueError, match="ratio=0"):
        op.delta_from_ratio(0)
