"""What every op makes of arguments that are no arrays, of second derivatives and of second calls."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import binary_matmul, block_sparse_attention, ffd_decode, matvec
from pallas_kernels.ffd_decode import arguments
from tests.kernels import levels

RNG = np.random.default_rng(0)
WORDS = binary_matmul.pack_signs(RNG.choice([-1, 1], (16, 8)))
X = RNG.normal(size=(2, 16)).astype("f")
K, V = RNG.normal(size=(2, 1, 2, 32, 8)).astype("f")
CODED = ffd_decode.quantize_blocks(jnp.asarray(K), 16)
Q = RNG.normal(size=(1, 4, 8)).astype("f")
ROWS = RNG.normal(size=(1, 16, 2, 4)).astype("f")
BLOCKS = np.array([0, 1])[:, None].repeat(8, 0).reshape(1, 16, 1, 1).repeat(2, 2)
CODES, SCALE = RNG.integers(0, 256, (3, 8)).astype(np.uint8), np.ones((3, 1), "f")

CALLS = {
    "sign_matmul": (lambda x, **o: binary_matmul.sign_matmul(x, WORDS, **o), X),
    "ffd_decode": (lambda q, **o: ffd_decode.ffd_decode(q, *CODED, V, **{"threshold": "exact", **o}), Q),
    "block_sparse": (
        lambda q, **o: block_sparse_attention.block_sparse_attention(
            q, ROWS, ROWS, BLOCKS, **{"block_size": 8, **o}
        ),
        ROWS,
    ),
    "matvec": (lambda x: matvec.matvec(x, np.asarray(X.T)), X),
    "packed_matvec": (lambda x: matvec.packed_matvec(x, CODES, SCALE, bits=4), X),
}


@pytest.mark.parametrize("name", CALLS)
def test_lists_and_float64_are_taken_as_float32_arrays(name):
    call, x = CALLS[name]
    wanted = call(jnp.asarray(x))
    np.testing.assert_array_equal(call(x.tolist()), wanted)
    np.testing.assert_array_equal(call(x.astype("d")), wanted)


def test_float64_queries_have_the_error_bound_of_float32():
    rest = (*CODED, V, *[None] * 5, 1.0, None, "certified", 2, None)
    assert arguments.checked(Q.astype("d"), *rest) == arguments.checked(Q, *rest)


def test_lengths_may_be_lists():
    given = ffd_decode.ffd_decode(Q, *CODED, V, K[:, :, :3], V[:, :, :3], num_blocks=[1], tail_len=[2])
    arrays = {"num_blocks": np.array([1]), "tail_len": np.array([2])}
    wanted = ffd_decode.ffd_decode(Q, *CODED, V, K[:, :, :3], V[:, :, :3], **arrays)
    np.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_eager_call_and_its_gradient_compile_nothing(name, caplog):
    call, x = CALLS[name]
    slope = jax.grad(lambda x: call(x).sum())
    for _ in range(2):
        jax.block_until_ready((call(jnp.asarray(x)), slope(jnp.asarray(x))))
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        jax.jit(lambda x: x * 1.0625)(jnp.ones(3))
        assert "Compiling" in caplog.text  # so that a compilation would be seen
        caplog.clear()
        jax.block_until_ready((call(jnp.asarray(x)), slope(jnp.asarray(x))))
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name):
    """Along a direction, against differences of the first."""
    call, x = CALLS[name]
    x, direction = jnp.asarray(x), jnp.asarray(RNG.normal(size=x.shape).astype("f"))
    slope = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(call(x)))))
    got = jnp.sum(jax.jit(jax.grad(lambda x: jnp.sum(slope(x) * direction)))(x) * direction)
    step = 1e-2
    wanted = jnp.sum((slope(x + step * direction) - slope(x - step * direction)) * direction) / (2 * step)
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)


OPTIONS = [
    ("ffd_decode", {"num_splits": 2.5}, ValueError, r"num_splits=2\.5 must be an int from 1"),
    ("ffd_decode", {"delta": None}, TypeError, "delta must be an array of numbers, not NoneType"),
    ("ffd_decode", {"delta": "5"}, TypeError, "delta must be an array of numbers, not str"),
    ("ffd_decode", {"scale": "a"}, TypeError, "scale='a' must be a number"),
    ("ffd_decode", {"scale": float("inf")}, ValueError, "scale=inf must be finite"),
    ("ffd_decode", {"threshold": None}, TypeError, "threshold must be an array of numbers"),
    ("ffd_decode", {"threshold": np.ones((1, 4), bool)}, TypeError, "threshold must be floating, not bool"),
    ("block_sparse", {"scale": float("nan")}, ValueError, "scale=nan must be finite"),
    ("block_sparse", {"scale": "a"}, TypeError, "scale='a' must be a number"),
    ("block_sparse", {"causal": "no"}, TypeError, "causal='no' must be True or False"),
    ("block_sparse", {"blocks": {"keys": 16}}, TypeError, "blocks must be BlockSizes or None, not dict"),
    ("sign_matmul", {"block_sizes": (16, 32, 16)}, TypeError, "must be BlockSizes or None, not tuple"),
    ("sign_matmul", {"scale_in": "a"}, TypeError, "scale_in must be an array of numbers, not str"),
]


@pytest.mark.parametrize(("name", "options", "error", "message"), OPTIONS)
def test_options_that_are_no_numbers(name, options, error, message):
    call, x = CALLS[name]
    with pytest.raises(error, match=message):
        call(x, **options)


@pytest.mark.parametrize("name", ["ffd_decode", "block_sparse"])
def test_a_traced_scale_is_refused_in_words(name):
    call, x = CALLS[name]
    with pytest.raises(TypeError, match="scale must be a number that is known when the call is traced"):
        jax.jit(lambda scale: call(x, scale=scale))(1.0)


def test_integers_of_numpy_are_sizes():
    call, x = CALLS["block_sparse"]
    np.testing.assert_array_equal(call(x, block_size=np.int64(8)), call(x))


def test_codes_and_words_that_packing_would_garble():
    for codes in ([5, 0], [-1, 0]):
        with pytest.raises(ValueError, match=r"codes must be in 0\.\.3, but hold"):
            ffd_decode.pack_codes(jnp.array(codes), 2)
    with pytest.raises(TypeError, match="codes must be integers"):
        ffd_decode.pack_codes(jnp.array([1.5]), 2)
    with pytest.raises(TypeError, match="packed must be uint8, not int32"):
        ffd_decode.unpack_codes(jnp.array([300]), 2, 4)
    with pytest.raises(ValueError, match="must end with 3 bytes for 9 channels"):
        ffd_decode.unpack_codes(jnp.zeros(1, jnp.uint8), 2, 9)
    with pytest.raises(TypeError, match="residual_dtype must be floating, not int8"):
        ffd_decode.quantize_blocks(jnp.asarray(K), 16, residual_dtype=jnp.int8)
    with pytest.raises(TypeError, match="words must be uint32"):
        binary_matmul.unpack_signs(np.zeros((1, 2), np.uint8), 32)
    with pytest.raises(ValueError, match="axis=3 is not one of"):
        binary_matmul.unpack_signs(WORDS, 16, axis=3)
    with pytest.raises(ValueError, match="size=-3 must be an int from 0"):
        binary_matmul.unpack_signs(WORDS[:0], -3)
    with pytest.raises(TypeError, match="signs holds uint8, which has no -1"):
        jax.jit(binary_matmul.pack_signs)(jnp.ones(3, jnp.uint8))


SIZES = {
    "pallas_gpu": [
        ({"columns": 33}, "columns=33 is no power of two"),
        ({"words": 8}, "words=8 is no power of two from 16"),
        ({"num_warps": 3}, "num_warps=3 is no power of two"),
        ({"rows": 24}, "rows=24 is no power of two"),
    ],
    "pallas_tpu": [
        ({"columns": 64}, "columns=64 is no multiple of 128"),
        ({"words": 100}, "words=100 is no multiple of 128, and less than all 256"),
        ({"rows": 17}, "rows=17 is no multiple of 16"),
    ],
}


@pytest.mark.parametrize(
    ("form", "change", "message"), [(form, *case) for form, cases in SIZES.items() for case in cases]
)
def test_block_sizes_that_a_form_cannot_take(form, change, message):
    """Refused by name; with no name the call goes through XLA."""
    sizes = binary_matmul.BlockSizes(**{"rows": 16, "columns": 128, "words": 128, **change})
    args = jax.ShapeDtypeStruct((64, 8192), jnp.bfloat16), jax.ShapeDtypeStruct((256, 256), jnp.uint32)
    product = functools.partial(binary_matmul.sign_matmul, block_sizes=sizes)
    platform = "cuda" if form == "pallas_gpu" else "tpu"
    with pytest.raises(NotImplementedError, match=re.escape(f"{form}: ") + f".*{message}"):
        levels.lower(platform, functools.partial(product, implementation="pallas"), *args)
    with pytest.raises(AssertionError, match="no Pallas kernel"):
        levels.lower(platform, product, *args)


def test_sizes_below_one_or_of_another_kind():
    with pytest.raises(ValueError, match=r"block_sizes\.splits=0 must be an int from 1"):
        binary_matmul.BlockSizes(16, 32, 16, splits=0)
    with pytest.raises(ValueError, match=r"block_sizes\.rows=16\.5 must be an int"):
        binary_matmul.BlockSizes(16.5, 32, 16)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"blocks\.num_warps=3 must be a power of two"):
        block_sparse_attention.BlockSizes(num_warps=3)
    with pytest.raises(ValueError, match="platform='amd' must be 'gpu' or 'tpu'"):
        binary_matmul.default_blocks("amd", 1, 1, 1)
    with pytest.raises(ValueError, match="rows=0 must be an int from 1"):
        binary_matmul.default_blocks("gpu", 0, 1, 1)
