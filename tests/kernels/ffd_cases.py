"""Inputs of `ffd_decode`, its definition in float64 NumPy, and how a test calls one of its forms."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import ffd_decode as op
from pallas_kernels.ffd_decode import cpu, pallas_gpu, pallas_tpu

KERNELS = {"pallas_gpu": pallas_gpu, "pallas_tpu": pallas_tpu}
FORMS = ["xla", "cpu", *KERNELS]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@contextlib.contextmanager
def running(form, interpret=True):
    """The public function takes this kernel, in its interpreter."""

    def offered(spec):
        inside = dataclasses.replace(spec, interpret=interpret)
        return {"xla": functools.partial(KERNELS[form].attend_blocks, inside)}

    with mock.patch.object(op, "_offered", offered), mock.patch.object(op, "_decode", op._decode.__wrapped__):
        yield


@functools.cache
def compiled(form, options, interpret):
    named = form if form in ("xla", "cpu") else None

    def traced(arrays):
        with contextlib.nullcontext() if named else running(form, interpret):
            return op.ffd_decode(**arrays, **dict(options), return_stats=True, implementation=named)

    return jax.jit(traced)


def call(form, arrays, options, interpret=True):
    """Output and statistics; everything is traced once for the same shapes and options."""
    if form == "cpu" and cpu.why_not():
        pytest.skip(str(cpu.why_not()))
    # Only the plain interpreter is the same from one call to the next.
    program = compiled if interpret is True else compiled.__wrapped__
    return program(form, tuple(sorted(options.items())), interpret)(jax.tree.map(jnp.asarray, arrays))


def quick():
    """The form that is compiled fastest, for what does not depend on it."""
    return "xla" if cpu.why_not() else "cpu"


def pack(codes, bits):
    """Codes as bytes, the first channel in the lowest bits; padded with the code next to the middle."""
    per_byte = 8 // bits
    pad = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_byte)]
    codes = np.pad(codes.astype(int), pad, constant_values=round((2**bits - 1) / 2))
    codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    return (codes << (bits * np.arange(per_byte))).sum(-1).astype(np.uint8)


def quantised(k, block, bits, residual):
    """What `quantize_blocks` must give, in NumPy."""
    split = k.reshape(*k.shape[:-2], k.shape[-2] // block, block, k.shape[-1]).astype(np.float32)
    z = np.float32((2**bits - 1) / 2)
    scale = np.maximum(np.abs(split).max(-2) / z, np.float32(1e-8))
    codes = np.clip(np.rint(split / scale[..., None, :] + z), 0, 2 * z)
    rest = split - (codes - z) * scale[..., None, :]
    most = float(ml_dtypes.finfo(residual).max)
    return (
        pack(codes, bits).reshape(*k.shape[:-1], -(-k.shape[-1] * bits // 8)),
        scale,
        np.clip(rest, -most, most).astype(residual).reshape(k.shape),
    )


def case(seed=0, *, batch=2, kv_heads=2, group=3, d=32, dv=24, block=16, blocks=5, tail=8, bits=2, dtype="float32",
         residual="float8_e4m3fn", counts=None, tails=None):  # fmt: skip
    """Arguments of `ffd_decode`; some blocks have keys that no query likes."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(batch, kv_heads, blocks, block, d))
    direction = rng.normal(size=d)
    k += direction * rng.choice([-0.6, 0.3], (batch, kv_heads, blocks, 1, 1))
    q = rng.normal(size=(batch, kv_heads * group, d)) + 1.5 * direction
    cache = quantised(k.reshape(batch, kv_heads, blocks * block, d), block, bits, jnp.dtype(residual))
    normal = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))
    arrays = {"q": q.astype(jnp.dtype(dtype)), **dict(zip(("k_code", "k_scale", "k_resid"), cache))}
    arrays["v"] = normal(batch, kv_heads, blocks * block, dv)
    if tail:
        arrays["k_tail"], arrays["v_tail"] = (
            normal(batch, kv_heads, tail, d),
            normal(batch, kv_heads, tail, dv),
        )
        arrays["tail_len"] = np.asarray(
            rng.integers(0, tail + 1, batch) if tails is None else tails, np.int32
        )
    arrays["num_blocks"] = np.asarray(
        rng.integers(0, blocks + 1, batch) if counts is None else counts, np.int32
    )
    return arrays


def bits_of(packed, bits, channels):
    """Codes by Python's own bits: channel j in bits `bits * j` of the whole row as one little-endian number."""
    flat = packed.reshape(-1, packed.shape[-1])
    rows = [int.from_bytes(row.tobytes(), "little") for row in flat]
    codes = [[(row >> (bits * j)) & (2**bits - 1) for j in range(channels)] for row in rows]
    return np.array(codes, float).reshape(*packed.shape[:-1], channels)


class Oracle:
    """The definition in float64: two passes, explicit sets. One row of the batch and one KV head at a time."""

    def __init__(self, arrays, bits=2, scale=None):
        self.a = {name: np.asarray(x) for name, x in arrays.items()}
        self.bits = bits
        q = self.a["q"].astype(float)
        batch, _, d = q.shape
        kv_heads, blocks = self.a["k_scale"].shape[1:3]
        self.q = q.reshape(batch, kv_heads, -1, d) * (d**-0.5 if scale is None else scale)
        self.shape = batch, kv_heads, self.q.shape[2], blocks
        self.s = self.a["k_scale"].astype(float)
        by_block = lambda x: x.reshape(batch, kv_heads, blocks, x.shape[2] // max(blocks, 1), x.shape[-1])
        z = (2**bits - 1) / 2
        self.base = (by_block(bits_of(self.a["k_code"], bits, d)) - z) * self.s[:, :, :, None]
        self.full = self.base + by_block(self.a["k_resid"].astype(float))
        self.v = by_block(self.a["v"].astype(float))
        self.counts = self.a["num_blocks"]

    def tail(self, b, h):
        if "k_tail" not in self.a:
            return np.zeros((0, self.q.shape[-1])), np.zeros((0, self.v.shape[-1]))
        length = self.a["tail_len"][b]
        return (self.a[name][b, h, :length].astype(float) for name in ("k_tail", "v_tail"))

    def bound(self, b, h, n):
        """Half a level, and what rounding adds: of the residual (a share of it, or half the smallest number), of products."""
        products = 2**-8 * (2**self.bits - 1) / 2 if self.a["q"].dtype.name == "bfloat16" else 0
        share, least = {"float8_e4m3fn": (2**-4, 2**-10)}.get(self.a["k_resid"].dtype.name, (2**-8, 0))
        half = (0.5 * (1 + share) + products) * self.s[b, h, n] + least
        return np.abs(self.q[b, h]) @ half

    def top(self, keys, b, h, n):
        return (self.q[b, h] @ keys[b, h, n].T).max(-1)

    def threshold(self, mode, delta):
        batch, kv_heads, group, _ = self.shape
        found = np.full((batch, kv_heads, group), -np.inf)
        for b, h in np.ndindex(batch, kv_heads):
            count = self.counts[b]
            probes = range(count) if mode == "exact" else [0, count - 1] if count else []
            keys = self.full if mode in ("exact", "pseudo_fp") else self.base
            tops = [
                self.top(keys, b, h, n) - (self.bound(b, h, n) if mode == "certified" else 0) for n in probes
            ]
            if mode != "pseudo":
                tops += [self.q[b, h] @ key for key in next(iter(self.tail(b, h)))]
            if tops:
                found[b, h] = np.max(tops, axis=0)
        return found - delta

    def distances(self, mode, threshold):
        """How far the best scan score of each block is above what it must reach; -inf for blocks that aren't there."""
        found = np.full((self.shape[0], self.shape[1], self.shape[3]), -np.inf)
        for b, h in np.ndindex(*self.shape[:2]):
            for n in range(self.counts[b]):
                top = self.top(self.base, b, h, n) + (self.bound(b, h, n) if mode == "certified" else 0)
                found[b, h, n] = np.max(top - threshold[b, h])
        return found

    def attend(self, kept):
        """Attention and log Σ e^s over the kept blocks and the tail."""
        batch, kv_heads, group, blocks = self.shape
        out = np.zeros((batch, kv_heads, group, self.v.shape[-1]))
        lse = np.full(out.shape[:3], -np.inf)
        for b, h in np.ndindex(batch, kv_heads):
            k_tail, v_tail = self.tail(b, h)
            keys = np.concatenate([*(self.full[b, h, n] for n in range(blocks) if kept[b, h, n]), k_tail])
            values = np.concatenate([*(self.v[b, h, n] for n in range(blocks) if kept[b, h, n]), v_tail])
            if len(keys):
                scores = self.q[b, h] @ keys.T
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                lse[b, h] = scores.max(-1) + np.log(weights.sum(-1))
                out[b, h] = weights @ values / weights.sum(-1, keepdims=True)
        return out.reshape(batch, kv_heads * group, -1), lse.reshape(batch, -1)


def check(got, arrays, options):
    """Output, threshold, kept blocks and log-sum-exp of a call are the oracle's; hands back the kept blocks."""
    out, stats = got
    dtype = arrays["q"].dtype.name
    oracle = Oracle(arrays, options.get("bits", 2))
    mode = options.get("threshold", "pseudo_fp")
    if "threshold" not in arrays:
        delta = float(arrays.get("delta", options.get("delta", 5.0)))
        wanted = oracle.threshold(mode, delta).reshape(stats.threshold.shape)
        # The op's bound is wider by the rounding of float32 products.
        atol = 3e-2 if dtype == "bfloat16" else 1e-3 if mode == "certified" else 2e-5
        np.testing.assert_allclose(stats.threshold, wanted, atol=atol, rtol=1e-5)
    distance = oracle.distances(mode, np.asarray(stats.threshold, float).reshape(oracle.shape[:3]))
    kept = np.asarray(stats.kept)
    slack = (
        0.1 if dtype == "bfloat16" else 1e-3 if mode == "certified" else 1e-4
    )  # scans of bfloat16 operands
    assert kept[distance > slack].all()
    assert not kept[distance < -slack].any()
    out64, lse = oracle.attend(kept)
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        np.asarray(out, float), out64, atol=TOLERANCE[dtype] * max(1, np.abs(out64).max())
    )
    np.testing.assert_allclose(stats.lse, lse, atol=TOLERANCE[dtype] * 5, rtol=TOLERANCE[dtype])
    heads = np.asarray(arrays["num_blocks"]) * kept.shape[1]
    wanted = np.where(heads, kept.sum((1, 2)) / np.maximum(heads, 1), 1)
    np.testing.assert_allclose(stats.keep_ratio, wanted, rtol=1e-6)
    return kept
