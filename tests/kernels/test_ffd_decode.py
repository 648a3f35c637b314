"""Decoding on a low-bit cache against float64 NumPy, in every form that runs without an accelerator."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import ffd_decode as op
from pallas_kernels.ffd_decode import arguments, reference
from tests.kernels.ffd_cases import FORMS, Oracle, call, case, check, quick

# (arguments of `case`, static options). Lengths, numbers and δ are drawn for each, without another compilation.
WIDE = [
    ({"group": 3, "d": 33}, {}),
    ({"group": 1, "d": 64, "bits": 4, "tail": 0, "residual": "float32"}, {"threshold": "exact"}),
    ({"group": 8, "d": 80, "dtype": "bfloat16", "tail": 1, "block": 24, "dv": 64}, {"threshold": "pseudo"}),
    ({"group": 20, "d": 32, "residual": "bfloat16", "kv_heads": 1, "block": 8}, {"threshold": "certified"}),
]
NATIVE = [
    ({"group": 2, "d": 128, "bits": 4, "dtype": "bfloat16", "dv": 65}, {}),
    ({"group": 7, "d": 15, "dv": 130, "blocks": 9, "batch": 3}, {"threshold": "exact"}),
    ({"group": 4, "d": 64, "block": 128, "blocks": 10, "dv": 64, "residual": "bfloat16"}, {}),
    ({"group": 3, "d": 1, "bits": 4, "dv": 1, "tail": 0}, {"threshold": "certified"}),
]
SMALL = {"block": 32, "blocks": 6, "kv_heads": 1}
ARRAY = {"num_splits": 2}  # and the threshold as an array, as in the tests below: one program serves them all
OF_FORM = {
    "xla": WIDE,
    "cpu": [*WIDE, *NATIVE],
    "pallas_gpu": [
        (SMALL, ARRAY),
        ({"group": 3, "d": 33, "block": 24, "blocks": 3, "kv_heads": 1}, {"num_splits": 7}),
        ({"group": 20, "d": 80, "bits": 4, "dtype": "bfloat16", "blocks": 3, "batch": 1}, {"threshold": "certified"}),
    ],
    "pallas_tpu": [
        (SMALL, ARRAY),
        (
            {"group": 20, "d": 33, "bits": 4, "dtype": "bfloat16", "block": 32, "blocks": 9, "batch": 1, "kv_heads": 1},
            {"threshold": "certified", "num_splits": 8},
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "number"), [(form, i) for form, shapes in OF_FORM.items() for i in range(len(shapes))]
)
@hypothesis.settings(max_examples=4)
@hypothesis.given(delta=st.sampled_from([0.0, 0.5, 1.0, 3.0, float("inf")]), seed=st.integers(0, 99))
def test_every_form_is_the_oracle(form, number, delta, seed):
    shape, options = OF_FORM[form][number]
    arrays = case(seed, **shape)
    if options is ARRAY:
        arrays = with_threshold(arrays, delta=delta)
    else:
        options = {**options, "bits": shape.get("bits", 2)}
        arrays["delta"] = np.float32(delta)
    check(call(form, arrays, options), arrays, options)


def with_threshold(arrays, mode="pseudo", delta=0.5):
    """The same with the threshold as an array."""
    q = arrays["q"]
    return {**arrays, "threshold": Oracle(arrays).threshold(mode, delta).reshape(q.shape[:2]).astype("f")}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_kept_is_never_read(form):
    """NaN in every skipped residual and value, behind the filled blocks and behind the tail changes no bit."""
    arrays = with_threshold(case(4, **SMALL, counts=[6, 4], tails=[3, 0]))
    out, stats = call(form, arrays, ARRAY)
    kept = check((out, stats), arrays, {})
    assert 0.1 < kept[:, :, 1:].mean() < 0.7
    skipped = np.repeat(~kept, 32, axis=2)[..., None]
    behind = (np.arange(6) >= np.array([[6], [4]]))[:, None, :, None]
    poisoned = {
        **arrays,
        "k_resid": np.where(skipped, np.nan, arrays["k_resid"].astype("f")).astype(arrays["k_resid"].dtype),
        "v": np.where(skipped, np.nan, arrays["v"]),
        "k_scale": np.where(behind, np.nan, arrays["k_scale"]),
    }
    for name in ("k_tail", "v_tail"):
        poisoned[name] = arrays[name].copy()
        poisoned[name][0, :, 3:] = poisoned[name][1] = np.nan
    again, more = call(form, poisoned, ARRAY)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(more.kept, kept)


@pytest.mark.parametrize("form", FORMS)
def test_no_blocks_no_tail_and_thresholds_that_keep_all_or_none(form):
    arrays = with_threshold(case(5, **SMALL, counts=[0, 1], tails=[0, 0]))
    out, stats = call(form, arrays, ARRAY)
    check((out, stats), arrays, {})
    assert not np.asarray(out[0]).any()
    assert (np.asarray(stats.lse[0]) == -np.inf).all()
    arrays = case(6, **SMALL, counts=[6, 3], tails=[4, 0])
    for value, share in ((-np.inf, 1.0), (np.inf, 0.0)):
        arrays["threshold"] = np.full(arrays["q"].shape[:2], value, "f")
        got = call(form, arrays, ARRAY)
        check(got, arrays, {})
        np.testing.assert_array_equal(got[1].keep_ratio, share)
    assert not np.asarray(got[0][1]).any()


@pytest.mark.parametrize("form", FORMS)
def test_queries_that_are_not_finite_show(form):
    arrays = with_threshold(case(7, **SMALL, counts=[6, 6], tails=[0, 0]))
    arrays["q"] = arrays["q"].copy()
    arrays["q"][0, 0, 3] = np.nan
    out = np.asarray(call(form, arrays, ARRAY)[0])
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1]).all()
    assert np.isfinite(out[1]).all()


def test_a_probe_that_is_no_number_keeps_all():
    for form in ("xla", "cpu"):
        arrays = {**case(7, group=3, d=33, counts=[5, 5]), "delta": np.float32(0.5)}
        arrays["q"][0, 0, 3] = np.nan
        stats = call(form, arrays, {"bits": 2})[1]
        assert np.isnan(stats.threshold[0, 0])
        assert np.asarray(stats.kept)[0, 0].all()


def test_reference_is_the_oracle():
    arrays = case(9)
    spec, _ = arguments.checked(*(arrays.get(n) for n in ("q", "k_code", "k_scale", "k_resid", "v")), None, None,
                                None, None, None, 1.0, None, "pseudo_fp", 2, None)  # fmt: skip
    oracle = Oracle(arrays)
    threshold = oracle.threshold("pseudo_fp", 1.0).astype("f")
    seen = np.repeat((np.arange(8) < arrays["tail_len"][:, None])[:, None], 3, axis=1)
    names = ("k_code", "k_scale", "k_resid", "v", "k_tail", "v_tail", "num_blocks")
    given = (arrays["q"].reshape(2, 2, 3, -1), *(arrays[n] for n in names), seen, threshold)
    out, lse, kept = jax.jit(reference.attend, static_argnums=0)(spec, *given)
    distance = oracle.distances("pseudo_fp", threshold)
    np.testing.assert_array_equal(kept, distance >= 0)
    wanted = oracle.attend(np.asarray(kept))
    np.testing.assert_allclose(out.reshape(wanted[0].shape), wanted[0], atol=2e-5)
    np.testing.assert_allclose(lse.reshape(wanted[1].shape), wanted[1], atol=2e-5)


def test_few_queries_and_a_mask_over_the_tail():
    """Several queries give what each would alone over the blocks that they keep together."""
    arrays = case(11, kv_heads=1, group=2, counts=[5, 2], tails=[8, 5])
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 3, 2, 32)).astype("f")
    mask = rng.random((2, 3, 8)) < 0.5
    out, stats = call(quick(), {**arrays, "q": q, "tail_mask": mask}, {"delta": 0.5})
    assert (out.shape, stats.threshold.shape, stats.lse.shape) == ((2, 3, 2, 24), (2, 3, 2), (2, 3, 2))
    for i in range(3):
        _, own = call(quick(), {**arrays, "q": q[:, i], "tail_mask": mask[:, i]}, {"delta": 0.5})
        np.testing.assert_allclose(own.threshold, stats.threshold[:, i], rtol=1e-6)
        assert not (np.asarray(own.kept) & ~np.asarray(stats.kept)).any()
        for b in range(2):
            seen = mask[b, i] & (np.arange(8) < arrays["tail_len"][b])
            one = {name: x[b : b + 1] for name, x in arrays.items()}
            one.update(q=q[b : b + 1, i], tail_len=np.array([seen.sum()]))
            one["k_tail"], one["v_tail"] = one["k_tail"][:, :, seen], one["v_tail"][:, :, seen]
            wanted = Oracle(one).attend(np.asarray(stats.kept[b : b + 1]))[0]
            np.testing.assert_allclose(out[b, i], wanted[0], atol=2e-5)


def test_which_form_a_cpu_takes(monkeypatch):
    """Native code where it can be built and takes the residuals, else XLA's; a named one says why it can't."""
    arrays = {name: jnp.asarray(x) for name, x in case(0, blocks=3).items()}
    monkeypatch.setattr(op, "_decode", op._decode.__wrapped__)  # which keeps what it chose

    def taken(**change):
        return str(jax.make_jaxpr(lambda a: op.ffd_decode(**a))({**arrays, **change})).count("effml_ffd")

    half = {"k_resid": arrays["k_resid"].astype(jnp.float16)}
    assert op.cpu.why_not() or taken() == 2  # a probe and the blocks
    assert taken(**half) == 0
    with pytest.raises(NotImplementedError, match="'cpu' cannot run: cpu: k_resid of float16"):
        op.ffd_decode(**{**arrays, **half}, implementation="cpu")
    monkeypatch.setenv("EFFML_NATIVE", "0")
    assert taken() == 0
    with pytest.raises(NotImplementedError, match="switched off"):
        op.ffd_decode(**arrays, implementation="cpu")
