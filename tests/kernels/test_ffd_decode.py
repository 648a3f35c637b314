"""Decoding on a low-bit cache against float64 NumPy, in every form that runs without an accelerator."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import ffd_decode as op
from pallas_kernels.ffd_decode import arguments, pallas_gpu, pallas_tpu, reference, xla
from tests.kernels import levels

FORMS = {"xla": xla, "pallas_gpu": pallas_gpu, "pallas_tpu": pallas_tpu}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@contextlib.contextmanager
def running(form, interpret=True):
    """The public function takes this form, in its interpreter."""

    def offered(spec):
        inside = dataclasses.replace(spec, interpret=False if form == "xla" else interpret)
        return {"xla": functools.partial(FORMS[form].attend_blocks, inside)}

    with mock.patch.object(op, "_offered", offered), mock.patch.object(op, "_decode", op._decode.__wrapped__):
        yield


@functools.cache
def compiled(form, options, interpret):
    del form, interpret
    return jax.jit(lambda a: op.ffd_decode(**a, **dict(options), return_stats=True))


def call(form, arrays, options, interpret=True):
    """Output and statistics; kernels are traced once for the same shapes and options."""
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    if form == "xla":
        return op.ffd_decode(**arrays, **options, return_stats=True)
    with running(form, interpret):
        key = interpret if interpret is True else object()
        return compiled(form, tuple(options.items()), key)(arrays)


def case(seed=0, *, batch=2, kv_heads=2, group=3, d=32, dv=24, block=16, blocks=5, tail=8, bits=2, dtype="float32",
         residual="float8_e4m3fn", counts=None, tails=None):  # fmt: skip
    """Arguments of `ffd_decode`; some blocks have keys that no query likes."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(batch, kv_heads, blocks, block, d))
    direction = rng.normal(size=d)
    k += direction * rng.choice([-0.6, 0.3], (batch, kv_heads, blocks, 1, 1))
    q = rng.normal(size=(batch, kv_heads * group, d)) + 1.5 * direction
    cache = op.quantize_blocks(
        jnp.asarray(k.reshape(batch, kv_heads, -1, d), jnp.float32),
        block,
        bits,
        residual_dtype=jnp.dtype(residual),
    )
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    arrays = {"q": jnp.asarray(q, dtype), **dict(zip(("k_code", "k_scale", "k_resid"), cache))}
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
        batch, heads, d = q.shape
        kv_heads, blocks = self.a["k_scale"].shape[1:3]
        self.shape = batch, kv_heads, heads // kv_heads, blocks
        self.q = q.reshape(batch, kv_heads, -1, d) * (d**-0.5 if scale is None else scale)
        self.s = self.a["k_scale"].astype(float)
        by_block = lambda x: x.reshape(batch, kv_heads, blocks, -1, x.shape[-1])
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
        """Half a level, and what rounding adds: of the residual (2^-4 of it, or half the smallest number), of products."""
        products = 2**-8 * (2**self.bits - 1) / 2 if self.a["q"].dtype.name == "bfloat16" else 0
        half = (0.5 * (1 + 2**-4) + products) * self.s[b, h, n] + 2.0**-10
        return np.abs(self.q[b, h]) @ half

    def top(self, keys, b, h, n):
        return (self.q[b, h] @ keys[b, h, n].T).max(-1)

    def threshold(self, mode, delta):
        batch, kv_heads, group, _ = self.shape
        found = np.full((batch, kv_heads, group), -np.inf)
        for b, h in np.ndindex(batch, kv_heads):
            probes = (
                range(self.counts[b])
                if mode == "exact"
                else [0, self.counts[b] - 1]
                if self.counts[b]
                else []
            )
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


def check(got, arrays, options, dtype="float32"):
    """Output, threshold, kept blocks and log-sum-exp of a call are the oracle's; hands back the kept blocks."""
    out, stats = got
    oracle = Oracle(arrays, options.get("bits", 2))
    mode = options.get("threshold", "pseudo_fp")
    if isinstance(mode, str):
        wanted = oracle.threshold(mode, options.get("delta", 5.0)).reshape(stats.threshold.shape)
        # The op's bound is wider by the rounding of float32 products.
        atol = 3e-2 if dtype == "bfloat16" else 1e-3 if mode == "certified" else 2e-5
        np.testing.assert_allclose(stats.threshold, wanted, atol=atol, rtol=1e-5)
    distance = oracle.distances(mode, np.asarray(stats.threshold, float).reshape(oracle.shape[:3]))
    kept = np.asarray(stats.kept)
    slack = (
        (1e-3 if mode == "certified" else 1e-4) if dtype == "float32" else 0.1
    )  # scan scores of bfloat16 operands
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


def test_packing_round_trip_is_exact():
    rng = np.random.default_rng(0)
    for bits in (2, 4):
        for channels in (1, 3, 4, 33, 64):
            codes = rng.integers(0, 2**bits, (2, 5, channels))
            packed = np.asarray(op.pack_codes(jnp.asarray(codes), bits))
            assert packed.shape[-1] == op.code_bytes(channels, bits) == math.ceil(channels * bits / 8)
            np.testing.assert_array_equal(bits_of(packed, bits, channels), codes)
            np.testing.assert_array_equal(op.unpack_codes(packed, bits, channels), codes)


@pytest.mark.parametrize("bits", [2, 4])
def test_quantiser(bits):
    rng = np.random.default_rng(0)
    k = rng.normal(size=(2, 48, 9)).astype("f")
    k[..., 3] = 0
    z = (2**bits - 1) / 2
    code, scale, residual = op.quantize_blocks(jnp.asarray(k), 16, bits, residual_dtype=jnp.float32)
    split = k.reshape(2, 3, 16, 9).astype(float)
    wanted = np.maximum(np.abs(split).max(2) / z, 1e-8)
    np.testing.assert_allclose(scale, wanted, rtol=1e-6)
    levels_of = (bits_of(np.asarray(code), bits, 9).reshape(split.shape) - z) * np.asarray(scale, float)[
        :, :, None
    ]
    np.testing.assert_allclose(levels_of + np.asarray(residual).reshape(split.shape), split, atol=1e-6)
    assert (np.abs(split - levels_of) <= wanted[:, :, None] / 2 * (1 + 1e-5)).all()
    base = jax.vmap(lambda c, s: op.dequantize(c, s, bits), (1, 1), 1)(code.reshape(2, 3, 16, -1), scale)
    np.testing.assert_allclose(base, levels_of, atol=1e-6)
    large = op.quantize_block(jnp.full((8, 2), 3e4).at[0].set(-3e4).at[1].set(1e4), bits)[2]
    assert np.isfinite(large.astype(jnp.float32)).all()  # float8 would be NaN above 448


@hypothesis.settings(max_examples=4)
@hypothesis.given(
    group=st.sampled_from([1, 2, 3, 4, 8, 20]),
    d=st.sampled_from([32, 33, 64, 80]),
    bits=st.sampled_from([2, 4]),
    mode=st.sampled_from(["pseudo", "pseudo_fp", "exact", "certified"]),
    tail=st.sampled_from([0, 1, 8]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
@hypothesis.example(group=3, d=33, bits=2, mode="pseudo_fp", tail=8, dtype="float32", seed=0)
def test_xla(group, d, bits, mode, tail, dtype, seed):
    arrays = case(seed, group=group, d=d, bits=bits, tail=tail, dtype=dtype)
    options = {"bits": bits, "threshold": mode, "delta": 1.0}
    check(call("xla", arrays, options), arrays, options, dtype)


@pytest.mark.parametrize("form", ["pallas_gpu", "pallas_tpu"])
@hypothesis.settings(max_examples=2)
@hypothesis.given(
    group=st.sampled_from([1, 2, 3, 8, 20]),
    d=st.sampled_from([32, 33, 80]),
    bits=st.sampled_from([2, 4]),
    mode=st.sampled_from(["pseudo_fp", "certified"]),
    splits=st.sampled_from([None, 1, 2, 7]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
@hypothesis.example(group=3, d=33, bits=2, mode="pseudo_fp", splits=3, dtype="float32", seed=1)
@hypothesis.example(group=20, d=80, bits=4, mode="certified", splits=8, dtype="bfloat16", seed=2)
def test_kernels(form, group, d, bits, mode, splits, dtype, seed):
    block = 32 if form == "pallas_tpu" else [16, 24][seed % 2]
    arrays = case(
        seed, group=group, d=d, bits=bits, dtype=dtype, block=block, kv_heads=1, blocks=3 + seed % 2
    )
    options = {"bits": bits, "threshold": mode, "delta": 0.5, "num_splits": splits}
    check(call(form, arrays, options), arrays, options, dtype)


SMALL, PSEUDO = (
    {"block": 32, "blocks": 6, "kv_heads": 1},
    {"delta": 0.5, "num_splits": 2, "threshold": "pseudo"},
)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_kept_is_never_read(form):
    """NaN in every skipped residual and value, behind the filled blocks and behind the tail changes no bit."""
    arrays = case(4, **SMALL, counts=[6, 4], tails=[3, 0])
    options = PSEUDO  # whose probes read no residual
    out, stats = call(form, arrays, options)
    kept = check((out, stats), arrays, options)
    assert 0.1 < kept[:, :, 1:].mean() < 0.7
    skipped = np.repeat(~kept, 32, axis=2)[..., None]
    behind = (np.arange(6) >= np.array([[6], [4]]))[:, None, :, None]
    poisoned = {
        **arrays,
        "k_resid": jnp.where(skipped, jnp.nan, arrays["k_resid"].astype(jnp.float32)).astype(
            jnp.float8_e4m3fn
        ),
        "v": jnp.where(skipped, jnp.nan, arrays["v"]),
        "k_scale": jnp.where(behind, jnp.nan, arrays["k_scale"]),
        "k_tail": arrays["k_tail"].at[0, :, 3:].set(jnp.nan).at[1].set(jnp.nan),
        "v_tail": arrays["v_tail"].at[0, :, 3:].set(jnp.nan).at[1].set(jnp.nan),
    }
    again, more = call(form, poisoned, options)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(more.kept, kept)
    # ... nor does it reach a gradient.
    if form == "xla":
        still = {name: jnp.asarray(x) for name, x in poisoned.items() if name not in ("q", "v")}
        loss = lambda q, v: jnp.sum(op.ffd_decode(q, v=v, **still, **options) ** 2)
        assert all(np.isfinite(g).all() for g in jax.grad(loss, (0, 1))(arrays["q"], arrays["v"]))


@pytest.mark.parametrize("form", FORMS)
def test_no_blocks_no_tail_and_thresholds_that_keep_all_or_none(form):
    arrays = case(5, **SMALL, counts=[0, 1], tails=[0, 0])
    out, stats = call(form, arrays, PSEUDO)
    check((out, stats), arrays, PSEUDO)
    assert not np.asarray(out[0]).any()
    assert (np.asarray(stats.lse[0]) == -np.inf).all()
    arrays = case(6, **SMALL, counts=[6, 3], tails=[4, 0])
    for value, share in ((-np.inf, 1.0), (np.inf, 0.0)):
        threshold = jnp.full(arrays["q"].shape[:2], value)
        got = call(form, {**arrays, "threshold": threshold}, {})
        check(got, arrays, {"threshold": None})
        np.testing.assert_array_equal(got[1].keep_ratio, share)
    assert not np.asarray(got[0][1]).any()


@pytest.mark.parametrize("form", FORMS)
def test_queries_that_are_not_finite_show(form):
    arrays = case(7, **SMALL, counts=[6, 6], tails=[0, 0])
    out = np.asarray(call(form, {**arrays, "q": arrays["q"].at[0, 0, 3].set(jnp.nan)}, PSEUDO)[0])
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1]).all()
    assert np.isfinite(out[1]).all()


def test_tpu_kernel_has_no_race():
    arrays = case(8, batch=1, kv_heads=1, block=32, blocks=9, counts=[9])
    options = PSEUDO
    with levels.race_checked() as interpret:
        got = jax.block_until_ready(call("pallas_tpu", arrays, options, interpret))
    kept = check(got, arrays, options)
    assert 0 < kept.mean() < 1


def test_reference_is_the_oracle():
    arrays = case(9)
    out, stats = op.ffd_decode(**arrays, delta=1.0, return_stats=True)
    spec, _ = arguments.checked(*(arrays.get(n) for n in ("q", "k_code", "k_scale", "k_resid", "v")), None, None,
                                None, None, None, 1.0, None, "pseudo_fp", 2, None)  # fmt: skip
    rows = lambda x: x.reshape(2, 2, 3, *x.shape[2:])
    seen = jnp.repeat((jnp.arange(8) < arrays["tail_len"][:, None])[:, None], 3, axis=1)
    got = reference.attend(spec, rows(arrays["q"]), *(arrays[n] for n in ("k_code", "k_scale", "k_resid", "v", "k_tail", "v_tail", "num_blocks")), seen, rows(stats.threshold))  # fmt: skip
    np.testing.assert_allclose(got[0], rows(out), atol=2e-5)
    np.testing.assert_array_equal(got[2], stats.kept)


def test_infinite_delta_is_dense_attention():
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 1, 2, 48, 32))
    q = rng.normal(size=(1, 4, 32))
    arrays = {"q": jnp.asarray(q, jnp.float32), "v": jnp.asarray(v, jnp.float32)}
    scores = (q.reshape(2, 2, 32) @ np.swapaxes(k[0], 1, 2)) / math.sqrt(32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    dense = (weights / weights.sum(-1, keepdims=True) @ v[0]).reshape(1, 4, 32)
    for bits, residual, most in (
        (2, jnp.float32, 1e-5),
        (2, jnp.float8_e4m3fn, 3e-2),
        (4, jnp.float8_e4m3fn, 1e-2),
    ):
        cache = op.quantize_blocks(jnp.asarray(k, jnp.float32), 16, bits, residual_dtype=residual)
        out = op.ffd_decode(arrays["q"], *cache, arrays["v"], bits=bits, delta=math.inf)
        assert np.abs(np.asarray(out) - dense).max() < most * np.abs(dense).max()


def test_split_count_changes_nothing():
    arrays = case(10, batch=1, kv_heads=1, blocks=4, counts=[3])
    outs = [call("pallas_gpu", arrays, {"num_splits": n, "delta": 1.0})[0] for n in (1, 3)]
    np.testing.assert_allclose(outs[1], outs[0], atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_error_bounds_hold(bits):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        k = (rng.normal(size=(1, 2, 256, 32)) * np.exp(rng.normal(size=32))).astype("f")
        arrays = case(seed, batch=1, group=2, d=32, block=16, blocks=16, tail=0, counts=[16])
        cache = op.quantize_blocks(jnp.asarray(k), 16, bits)
        arrays.update(zip(("k_code", "k_scale", "k_resid"), cache))
        oracle = Oracle(arrays, bits)
        true = k.reshape(1, 2, 16, 16, 32).astype(float)
        for h, n in np.ndindex(2, 16):  # (a) of a scan score
            scan, exact = (oracle.q[0, h] @ x[0, h, n].T for x in (oracle.base, true))
            assert (np.abs(scan - exact) <= oracle.bound(0, h, n)[:, None]).all()
        options = {"bits": bits, "delta": 1.0}
        out, stats = op.ffd_decode(**arrays, **options, return_stats=True)
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
        kept = np.asarray(
            op.ffd_decode(**arrays, **options, threshold="certified", return_stats=True)[1].kept
        )
        for h, g in np.ndindex(2, 2):
            scores = oracle.q[0, h, g] @ true[0, h].reshape(-1, 32).T
            near = np.unique(np.flatnonzero(scores >= scores.max() - 1.0) // 16)
            assert kept[0, h, near].all()


def test_few_queries_and_a_mask_over_the_tail():
    """Several queries give what each would alone over the blocks that they keep together."""
    arrays = case(11, kv_heads=1, group=2, counts=[5, 2], tails=[8, 5])
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 3, 2, 32)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 3, 8)) < 0.5)
    out, stats = op.ffd_decode(**{**arrays, "q": q}, tail_mask=mask, delta=0.5, return_stats=True)
    assert (out.shape, stats.threshold.shape, stats.lse.shape) == ((2, 3, 2, 24), (2, 3, 2), (2, 3, 2))
    for i in range(3):
        _, own = op.ffd_decode(**{**arrays, "q": q[:, i]}, tail_mask=mask[:, i], delta=0.5, return_stats=True)
        np.testing.assert_allclose(own.threshold, stats.threshold[:, i], rtol=1e-6)
        assert not (np.asarray(own.kept) & ~np.asarray(stats.kept)).any()
        for b in range(2):
            seen = np.asarray(mask[b, i]) & (np.arange(8) < arrays["tail_len"][b])
            one = {name: np.asarray(x)[b : b + 1] for name, x in arrays.items()}
            one.update(q=np.asarray(q[b : b + 1, i]), tail_len=np.array([seen.sum()]))
            one["k_tail"], one["v_tail"] = one["k_tail"][:, :, seen], one["v_tail"][:, :, seen]
            wanted = Oracle(one).attend(np.asarray(stats.kept[b : b + 1]))[0]
            np.testing.assert_allclose(out[b, i], wanted[0], atol=2e-5)


@pytest.mark.parametrize("residual", ["float32", "float8_e4m3fn"])
def test_gradients(residual):
    """Those of the float64 definition by finite differences, and of the reference."""
    arrays = case(12, batch=1, kv_heads=1, residual=residual, counts=[4], tails=[5])
    options = {"delta": 0.5}
    still = {n: arrays[n] for n in ("k_code", "num_blocks", "tail_len")}
    names = ["q", "v", "k_tail", "v_tail", "k_scale", "k_resid"]
    stats = op.ffd_decode(**arrays, **options, return_stats=True)[1]
    assert 0 < stats.keep_ratio[0] < 1
    weight = np.random.default_rng(0).normal(size=(1, 3, 24))

    def loss(*moving):
        out, stats = op.ffd_decode(**dict(zip(names, moving)), **still, **options, return_stats=True)
        return jnp.sum(out * weight) + jnp.sum(stats.lse)

    grads = jax.jit(jax.grad(loss, tuple(range(len(names)))))(*(arrays[n] for n in names))
    rng = np.random.default_rng(1)
    for name, grad in zip(names, grads):
        assert grad.dtype == arrays[name].dtype
        if name == "k_resid" and residual != "float32":
            assert not np.asarray(grad, float).any()
            continue
        direction = rng.normal(size=grad.shape)
        both = []
        for sign in (1, -1):
            moved = {**arrays, name: np.asarray(arrays[name], float) + sign * 1e-5 * direction}
            out, lse = Oracle(moved).attend(np.asarray(stats.kept))
            both.append(np.sum(out * weight) + np.sum(lse))
        slope = (both[0] - both[1]) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(grad, float) * direction), slope, rtol=2e-3, atol=2e-3)


def test_transforms():
    arrays = case(13, counts=[5, 2], tails=[3, 8])
    names, values = list(arrays), [jnp.asarray(x) for x in arrays.values()]
    plain = lambda *a: op.ffd_decode(**dict(zip(names, a)), delta=0.5, return_stats=True)
    jitted = jax.jit(chex.assert_max_traces(plain, n=1))
    out, stats = jitted(*values)
    jitted(*values[:-1], jnp.array([1, 4], jnp.int32))  # other lengths, same program
    shape = jax.eval_shape(plain, *values)[0]
    assert (shape.shape, shape.dtype) == (out.shape, jnp.float32)
    with jax.enable_x64(True):
        loss = jax.checkpoint(lambda q: (plain(q, *values[1:])[0].sum(), plain(q, *values[1:])))
        slope, (wide, more) = jax.jit(jax.grad(loss, has_aux=True))(values[0])
        assert slope.dtype == wide.dtype == more.lse.dtype == jnp.float32
        np.testing.assert_allclose(wide, out, atol=1e-6)
    # vmap adds to the batch: over everything, and over queries alone
    stacked = jax.jit(jax.vmap(plain))(*(jnp.stack([x, x[::-1]]) for x in values))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], stacked), (out, stats), atol=1e-6)
    np.testing.assert_allclose(stacked[0][1], out[::-1], atol=1e-6)
    queries = jnp.stack([values[0], -values[0]])
    both = jax.vmap(jax.value_and_grad(lambda q: plain(q, *values[1:])[0].sum()))
    sums, slopes = jax.jit(both)(queries)
    np.testing.assert_allclose(sums[0], out.sum(), rtol=1e-4)
    np.testing.assert_allclose(sums[1], jitted(queries[1], *values[1:])[0].sum(), rtol=1e-4)
    np.testing.assert_allclose(slopes[0], slope, atol=1e-5)
    empty = op.ffd_decode(*(x[:0] for x in values[:5]), return_stats=True)
    assert empty[0].shape == (0, 6, 24)


def test_a_vmapped_call_reads_only_kept_blocks():
    arrays = case(14, counts=[5, 5], tail=0)
    mapped = {n: jnp.asarray(x)[:, None] for n, x in arrays.items()}
    text = str(jax.make_jaxpr(jax.vmap(lambda a: op.ffd_decode(**a)))(mapped))
    assert "cond[" in text  # of the number of kept blocks; a mapped condition would be a select


SHARDED = """
import os, json
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from pallas_kernels import ffd_decode as op
k, v = jax.random.normal(jax.random.key(0), (2, 2, 4, 64, 8))
q = jax.random.normal(jax.random.key(1), (2, 8, 8))
arrays = q, *op.quantize_blocks(k, 16), v, k[:, :, :8], v[:, :, :8], jnp.array([4, 1], jnp.int32)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "heads"))
local = lambda q, c, s, r, v, kt, vt, n: op.ffd_decode(q, c, s, r, v, kt, vt, num_blocks=n, delta=0.5)
f = jax.shard_map(local, mesh=mesh, in_specs=(P("data", "heads"),) * 7 + (P("data"),), out_specs=P("data", "heads"))
errors = [float(jnp.abs(jax.jit(f)(*arrays) - local(*arrays)).max())]
grads = [jax.grad(lambda q: jnp.sum(jnp.sin(g(q, *arrays[1:]))))(q) for g in (f, local)]
errors.append(float(jnp.abs(grads[0] - grads[1]).max()))
print(json.dumps(errors))
"""


def in_a_process(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_shard_map():
    assert max(in_a_process(SHARDED)) < 1e-5


TRITON = """
import json
import numpy as np, jax.numpy as jnp
from tests.kernels.test_ffd_decode import Buffer, case, check
from pallas_kernels import ffd_decode as op
from pallas_kernels.ffd_decode import triton
from pallas_kernels.ffd_decode.body import Spec, bound_of, finish, merge_partials
from pallas_kernels.ffd_decode.triton_kernel import ffd_decode_kernel

shares = []
for i, (options, more) in enumerate((
    ({}, dict(d=33, block=24)),
    ({"bits": 4, "threshold": "certified"}, dict(bits=4)),
    ({}, dict(dtype="bfloat16", group=1)),
)):
    options = {"delta": 0.5, **options}
    arrays = case(i, tail=0, blocks=4, counts=[4, 1], **more)
    stats = op.ffd_decode(**arrays, **options, return_stats=True)[1]
    q, code, scale, resid, v, count = (arrays[n] for n in ("q", "k_code", "k_scale", "k_resid", "v", "num_blocks"))
    (b, h, blocks, d), width, splits = scale.shape, v.shape[-1], 3
    rows = q.reshape(b, h, -1, d)
    r, bits = rows.shape[2], options.get("bits", 2)
    # Products are in float32: the interpreter multiplies bfloat16 as whole numbers.
    spec = Spec(bits, code.shape[2] // blocks, d**-0.5, "threshold" in options, bound_of(bits, resid.dtype, True))
    shapes = [(splits, b, h, r), (splits, b, h, r), (splits, b, h, r, width)]
    outs = [np.full(s, np.nan, "f") for s in shapes] + [np.zeros((b, h, blocks), "i")]
    threshold = stats.threshold.reshape(b, h, r)
    buffers = [Buffer(x) for x in (count, threshold, rows, code, scale, resid, v, *outs)]
    ffd_decode_kernel[(splits, h, b)](
        *buffers, **triton.constants(spec, r, d, width, code.shape[-1], blocks, splits)
    )
    m, total, acc, kept = (x.array for x in buffers[-4:])
    out, lse = finish(*merge_partials(*map(jnp.asarray, (m, total, acc))))
    stats = stats._replace(kept=jnp.asarray(kept > 0), lse=lse.reshape(b, -1))
    dtype = more.get("dtype", "float32")
    shares.append(float(check((out.reshape(b, -1, width).astype(dtype), stats), arrays, options, dtype).mean()))
print(json.dumps(shares))
"""


class Buffer:
    """NumPy memory as Triton's interpreter wants it: what it calls on a tensor."""

    kinds = {"float8_e4m3fn": "fp8e4nv", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "uint8": "u8"}

    def __init__(self, array):
        self.array = np.array(array, order="C")
        self.dtype = self.kinds[self.array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = untyped_storage

    def copy_(self, other):
        """The host's memory is the device's."""

    def new_empty(self, *args, **options):
        return Buffer(np.zeros(0, "f"))

    def set_(self, storage, *rest):
        self.array, self.dtype = storage.array, storage.dtype

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides


def test_triton_kernel_in_its_interpreter():
    pytest.importorskip("triton", reason="needs the triton wheel: pip install 'effml[kernel-ci]'")
    shares = in_a_process(TRITON, TRITON_INTERPRET="1")
    assert all(0 < share < 1 for share in shares)


def specs(batch=2, kv_heads=8, group=4, d=128, dv=128, block=128, blocks=64, bits=2, dtype=jnp.bfloat16):
    """What a decoding step of an 8B model hands over."""
    spec, tokens = jax.ShapeDtypeStruct, block * blocks
    return (
        spec((batch, kv_heads * group, d), dtype),
        spec((batch, kv_heads, tokens, -(-d * bits // 8)), jnp.uint8),
        spec((batch, kv_heads, blocks, d), jnp.float32),
        spec((batch, kv_heads, tokens, d), jnp.float8_e4m3fn),
        spec((batch, kv_heads, tokens, dv), dtype),
        spec((batch, kv_heads, block, d), dtype),
        spec((batch, kv_heads, block, dv), dtype),
        spec((batch,), jnp.int32),
        spec((batch,), jnp.int32),
    )


def decode(q, code, scale, resid, v, k_tail, v_tail, num_blocks, tail_len, **options):
    return op.ffd_decode(
        q, code, scale, resid, v, k_tail, v_tail, num_blocks=num_blocks, tail_len=tail_len, **options
    )


def test_gpu_code():
    (kernel,) = levels.compile_gpu(decode, *specs(), expect=("mma",))
    # Codes and scales are loaded before the branch around the block, residuals and values inside.
    assert kernel.shared_memory < 100 * 1024
    odd = specs(group=3, d=80, dv=40, block=24, blocks=5, bits=4)
    certified = functools.partial(decode, bits=4, threshold="certified")
    levels.compile_gpu(certified, *odd, expect=("mma",))
    levels.lower("cuda", decode, *specs(group=20, d=64, dv=64, block=64, blocks=5, dtype=jnp.float32))


def test_tpu_code():
    levels.compile_tpu(decode, *specs())
    certified = functools.partial(decode, bits=4, threshold="certified", num_splits=2)
    levels.compile_tpu(certified, *specs(group=3, d=80, dv=40, block=32, blocks=13, bits=4))
    levels.compile_tpu(decode, *specs(group=20, d=64, dv=64, block=64, blocks=5, dtype=jnp.float32))


def test_triton_kernel_as_sm_90_code():
    triton = pytest.importorskip("triton", reason="needs the triton wheel: pip install 'effml[kernel-ci]'")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.ffd_decode import triton as launcher
    from pallas_kernels.ffd_decode.body import Spec
    from pallas_kernels.ffd_decode.triton_kernel import ffd_decode_kernel

    names = ffd_decode_kernel.arg_names
    kinds = ("*i32", "*fp32", "*bf16", "*u8", "*fp32", "*fp8e4nv", "*bf16", "*fp32", "*fp32", "*fp32", "*i32")
    constants = launcher.constants(Spec(2, 128, 128**-0.5, exact_products=False), 4, 128, 128, 32, 64, 8)
    signature = {**dict(zip(names, kinds)), **dict.fromkeys(constants, "constexpr")}
    compiled = triton.compile(
        ASTSource(ffd_decode_kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "num_stages": 2},
    )
    assert compiled.metadata.shared <= levels.SHARED_MEMORY
    assert "mma" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowering_with_x64_grad_and_vmap(platform):
    args = specs(group=3, d=32, dv=32, block=32, blocks=4)
    with jax.enable_x64(True):
        levels.lower(platform, decode, *args)
    loss = lambda q, *rest: jnp.sum(decode(q, *rest, implementation="pallas").astype(jnp.float32) ** 2)
    levels.lower(platform, jax.grad(loss), *args)
    levels.lower(platform, jax.vmap(decode), *(jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in args))


GOOD = {name: np.asarray(x) for name, x in case(0).items()}


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "q must have 3 or 4 axes", {"q": np.zeros((2, 6), "f")}),
        (TypeError, "q must be float32 or bfloat16, not float16", {"q": GOOD["q"].astype("e")}),
        (ValueError, "q has 5 heads, which is no multiple of the 2 heads", {"q": GOOD["q"][:, :5]}),
        (TypeError, "k_code must be uint8, not int32", {"k_code": GOOD["k_code"].astype("i")}),
        (ValueError, r"k_code must have shape \(2, 2, 80, 16\)", {"bits": 4}),
        (ValueError, "bits=3 must be one of 2, 4", {"bits": 3}),
        (
            ValueError,
            "80 keys and k_scale 3 blocks: .* multiple of 8",
            {"k_scale": GOOD["k_scale"][:, :, :3]},
        ),
        (ValueError, "80 keys and k_scale 40 blocks", {"k_scale": np.zeros((2, 2, 40, 32), "f")}),
        (TypeError, "k_scale must be float32", {"k_scale": GOOD["k_scale"].astype("e")}),
        (TypeError, "k_resid must be floating", {"k_resid": np.zeros((2, 2, 80, 32), "i")}),
        (ValueError, "v must have shape", {"v": GOOD["v"][:, :, :79]}),
        (ValueError, "k_tail and v_tail must be given together", {"k_tail": None}),
        (ValueError, "v_tail must have shape", {"v_tail": GOOD["v_tail"][..., :3]}),
        (TypeError, "num_blocks must hold integers", {"num_blocks": np.zeros(2, "f")}),
        (ValueError, "num_blocks must be in 0..5, but holds 0 and 6", {"num_blocks": np.array([0, 6])}),
        (ValueError, "tail_len must be in 0..8, but holds -1", {"tail_len": np.array([-1, 8])}),
        (TypeError, "tail_mask must be bool", {"tail_mask": np.ones((2, 8), "i")}),
        (ValueError, r"tail_mask must have shape \(2, 8\)", {"tail_mask": np.ones((2, 7), bool)}),
        (ValueError, "delta=-1.0 must be at least 0", {"delta": -1}),
        (ValueError, "delta=nan must be at least 0", {"delta": math.nan}),
        (ValueError, "scale=0.0 must be", {"scale": 0}),
        (ValueError, "threshold='top' must be one of pseudo_fp, pseudo", {"threshold": "top"}),
        (ValueError, r"threshold must have shape \(2, 6\)", {"threshold": np.zeros((2, 5), "f")}),
        (ValueError, "num_splits=0 must be at least 1", {"num_splits": 0}),
        (ValueError, "implementation='cuda' is not known", {"implementation": "cuda"}),
        (
            NotImplementedError,
            "no NVIDIA GPU.*no TPU.*block=16 is no multiple of 32",
            {"implementation": "pallas"},
        ),
        (NotImplementedError, "triton: no NVIDIA GPU.*", {"implementation": "triton"}),
    ],
)
def test_bad_input(error, message, change):
    with pytest.raises(error, match=message):
        op.ffd_decode(**{**GOOD, **change})


def test_delta_from_ratio_and_availability():
    assert op.delta_from_ratio(math.exp(-3)) == pytest.approx(3)
    with pytest.raises(ValueError, match="ratio=0"):
        op.delta_from_ratio(0)
    assert len(op.availability()) == 4
    assert op.availability()[0].startswith("xla")
