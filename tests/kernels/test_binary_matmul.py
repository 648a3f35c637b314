"""Binary products against float64 NumPy, in every form that runs without an accelerator."""

import ctypes
import functools
import itertools
import json
import platform
import subprocess
import sys
from pathlib import Path

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import _native
from pallas_kernels import binary_matmul as op
from pallas_kernels.binary_matmul import bench, cpu, reference
from tests.kernels import levels

needs_native = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no native code: {cpu.why_not()}")

# Every example compiles: none are shrunk.
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
SIZES = [1, 31, 32, 33, 64, 70]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
# Small blocks, so that small matrices have several of them in every direction.
BLOCKS = {
    "pallas_gpu few rows": op.BlockSizes(rows=1, columns=32, words=16, splits=2),
    "pallas_gpu tensor cores": op.BlockSizes(rows=16, columns=32, words=16, splits=2),
    "pallas_tpu": op.BlockSizes(rows=16, columns=128, words=128),
}


def random_signs(rng, *shape):
    return rng.choice(np.array([-1, 1]), shape)


def case(sizes, rows, dtype="float32", seed=0):
    """x, the words, both scales and bias, and the float64 result; `sizes` are in, (rank,) out."""
    rng = np.random.default_rng(seed)
    signs = [random_signs(rng, *shape) for shape in itertools.pairwise(sizes)]
    x = jnp.asarray(rng.normal(size=(rows, sizes[0])), dtype)
    scale_in, scale_out, bias = (rng.normal(size=n).astype("f") for n in (sizes[0], sizes[-1], sizes[-1]))
    y = np.asarray(x, np.float64) * scale_in
    for matrix in signs:
        y = y @ matrix
    return x, [op.pack_signs(s) for s in signs], scale_in, scale_out, bias, y * scale_out + bias


def assert_near(got, wanted, dtype="float32"):
    assert got.shape == wanted.shape
    scale = max(1.0, np.abs(wanted).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=0, atol=TOLERANCE[dtype] * scale)


def test_words_hold_the_first_sign_in_the_lowest_bit_and_pad_with_plus_one():
    rng = np.random.default_rng(0)
    for size in range(71):
        signs = random_signs(rng, size, 2)
        words = np.asarray(op.pack_signs(signs))
        assert words.dtype == np.uint32
        assert words.shape == (-(-size // 32), 2)
        numbers = [sum(int(word) << (32 * i) for i, word in enumerate(words[:, column])) for column in (0, 1)]
        by_hand = [sum(1 << i for i, s in enumerate(signs[:, column]) if s < 0) for column in (0, 1)]
        assert numbers == by_hand


def test_unpacking_and_packing_inside_jit():
    rng = np.random.default_rng(0)
    for size in (0, 1, 32, 70):
        signs = random_signs(rng, size, 2)
        words = op.pack_signs(signs)
        np.testing.assert_array_equal(op.unpack_signs(words, size), signs)
        np.testing.assert_array_equal(jax.jit(op.pack_signs)(signs), words)
    turned = op.pack_signs(signs.T.astype("f"), axis=-1)
    np.testing.assert_array_equal(turned, words.T)
    np.testing.assert_array_equal(jax.jit(op.pack_signs, static_argnums=1)(signs.T, -1), words.T)
    np.testing.assert_array_equal(op.unpack_signs(turned, size, axis=1, dtype=jnp.int8), signs.T)


@hypothesis.settings(max_examples=5, phases=PHASES)
@hypothesis.given(
    sizes=st.lists(st.sampled_from([0, *SIZES]), min_size=2, max_size=3),
    rows=st.sampled_from([0, 1, 3, 5]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@hypothesis.example(sizes=[256, 96, 64], rows=4, dtype="float32")
@hypothesis.example(sizes=[0, 0], rows=0, dtype="float32")
def test_xla(sizes, rows, dtype):
    x, words, *rest, wanted = case(sizes, rows, dtype)
    function = op.sign_matmul if len(words) == 1 else op.binary_matmul
    dense = getattr(reference, function.__name__)
    through_xla = functools.partial(function, implementation="xla")
    got, slow = jax.jit(lambda *args: (through_xla(*args), dense(*args)))(x, *words, *rest)
    assert got.dtype == x.dtype
    assert_near(got, wanted, dtype)
    assert_near(slow, wanted, dtype)


def whole_numbers(rows, sizes, seed=0):
    """x, words and the exact result: sums of few whole numbers are exact in float32 in any order."""
    rng = np.random.default_rng(seed)
    signs = [random_signs(rng, *shape) for shape in itertools.pairwise(sizes)]
    x = rng.integers(-9, 10, (rows, sizes[0]))
    return jnp.asarray(x, "f"), [op.pack_signs(s) for s in signs], functools.reduce(np.matmul, signs, x)


# Tails of words, of tables (of 4 and of 3 inputs), of vectors and of row groups; many chunks; two stages.
NATIVE = [
    (1, [1, 1]),
    (3, [31, 15]),
    (2, [33, 17, 130]),
    (7, [70, 200]),
    (4, [99, 5, 1]),
    (1, [300, 65]),
    (5, [1100, 2051]),
    (1, [640, 96, 31]),
]


@needs_native
@pytest.mark.parametrize(("rows", "sizes"), NATIVE)
def test_native_code_is_exact_on_whole_numbers(rows, sizes):
    x, words, wanted = whole_numbers(rows, sizes)
    function = op.sign_matmul if len(words) == 1 else op.binary_matmul
    np.testing.assert_array_equal(function(x, *words, implementation="cpu"), wanted)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_code_with_scales(dtype):
    x, words, *rest, wanted = case([1536, 384, 577], 2, dtype)
    got = op.binary_matmul(x, *words, *rest, implementation="cpu")
    assert got.dtype == x.dtype
    assert_near(got, wanted, dtype)


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction set of x86")
@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ()])
def test_native_code_for_older_processors(flags, tmp_path, monkeypatch):
    if flags and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(_native, "_TUNING", (flags,))
    monkeypatch.setattr(_native, "sources", lambda: [Path(cpu.__file__).with_suffix(".cc")])
    library = ctypes.CDLL(str(_native.build(tmp_path / "old.so")))
    target = f"old_sign_products{len(flags)}"
    assert library.effml_sign_tables() == bool(flags)
    capsule = jax.ffi.pycapsule(library.effml_sign_products)
    jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    monkeypatch.setattr(cpu, "_TARGET", target)
    for rows, sizes in NATIVE[2:7]:
        x, words, wanted = whole_numbers(rows, sizes)
        np.testing.assert_array_equal(cpu.sign_products(x, *words), wanted)


@needs_native
def test_none_is_native_on_a_cpu_and_not_elsewhere():
    args = shapes(1, jnp.bfloat16, 70, 33, 130)
    assert "effml_sign_products" in jax.jit(op.binary_matmul).lower(*args).as_text()
    assert "effml_sign_products" not in levels.lower("cuda", op.binary_matmul, *args).as_text()
    through_xla = functools.partial(op.binary_matmul, implementation="xla")
    assert "effml_sign_products" not in jax.jit(through_xla).lower(*args).as_text()


@needs_native
def test_none_is_xla_on_a_processor_without_tables(monkeypatch):
    monkeypatch.setattr(_native, "number", lambda function: 0)
    monkeypatch.setattr(op, "_compiled", op._compiled.__wrapped__)  # which keeps what it chose
    text = lambda name: (
        jax.jit(functools.partial(op.sign_matmul, implementation=name))
        .lower(jnp.ones((1, 70)), np.zeros((3, 9), np.uint32))
        .as_text()
    )
    assert "effml_sign_products" not in text(None)
    assert "effml_sign_products" in text("cpu")


def interpreted(name, x, words, scale_in, interpret=True, blocks=None):
    blocks = blocks or BLOCKS[name]
    run = functools.partial(op._run, name.split()[0], blocks, interpret)
    return jax.jit(run)(x, scale_in, *words)


@pytest.mark.parametrize("name", BLOCKS)
@hypothesis.settings(max_examples=3, phases=PHASES)
@hypothesis.given(
    inputs=st.sampled_from([*SIZES, 1025]),
    outputs=st.sampled_from([*SIZES, 127, 128, 129]),
    rows=st.sampled_from([1, 3, 17]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@hypothesis.example(inputs=1025, outputs=33, rows=3, dtype="float32")
def test_kernels(name, inputs, outputs, rows, dtype):
    x, words, scale_in, scale_out, bias, wanted = case(
        [inputs, outputs], rows % 4 if "few" in name else rows, dtype
    )
    got = interpreted(name, x, words, scale_in)
    assert_near(got * scale_out + bias, wanted, dtype)


@pytest.mark.parametrize("name", BLOCKS)
def test_kernels_in_two_stages_with_the_default_blocks(name):
    rows = 1 if "few" in name else 5
    x, words, scale_in, scale_out, bias, wanted = case([70, 33, 130], rows)
    run = functools.partial(op._run, name.split()[0], None, True)
    assert_near(jax.jit(run)(x, scale_in, *words) * scale_out + bias, wanted)


def test_tpu_kernel_has_no_race():
    x, words, scale_in, scale_out, bias, wanted = case([8192 + 32, 130], 17)
    with levels.race_checked() as interpret:
        got = jax.block_until_ready(interpreted("pallas_tpu", x, words, scale_in, interpret))
    assert_near(got * scale_out + bias, wanted)


@pytest.mark.parametrize("name", ["xla", pytest.param("cpu", marks=needs_native), *BLOCKS])
def test_what_is_not_finite_stays_in_its_row_and_has_the_sign_of_its_column(name):
    signs = random_signs(np.random.default_rng(0), 40, 16)
    x = np.ones((3, 40), "f")
    x[0, 33], x[1, 3] = np.inf, np.nan
    blocks = BLOCKS.get(name, BLOCKS["pallas_tpu"])
    got = interpreted(name, jnp.asarray(x), [op.pack_signs(signs)], None, blocks=blocks)
    np.testing.assert_array_equal(got[0], np.inf * signs[33])
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[2], signs.sum(0))


@pytest.mark.parametrize("sizes", [[70, 33], [40, 33, 50]])
def test_gradients_are_those_of_the_dense_product(sizes):
    x, words, scale_in, scale_out, bias, _ = case(sizes, 6)
    function = op.sign_matmul if len(words) == 1 else op.binary_matmul
    dense = getattr(reference, function.__name__)

    def loss(f, x, *rest):
        return jnp.sum(jnp.sin(f(x.reshape(2, 3, -1), *words, *rest) / 100))

    args = x, scale_in, scale_out, bias
    got = jax.jit(jax.grad(functools.partial(loss, function), (0, 1, 2, 3)))(*args)
    wanted = jax.grad(functools.partial(loss, dense), (0, 1, 2, 3))(*args)
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)
    # Central differences of a linear function are exact but for rounding.
    linear = lambda x: jnp.sum(function(x, *words, scale_in, scale_out) * bias)
    direction = jnp.ones_like(x)
    difference = (linear(x + direction) - linear(x - direction)) / 2
    np.testing.assert_allclose(jnp.sum(jax.grad(linear)(x)), difference, rtol=1e-4)
    bf16 = jax.grad(lambda x: jnp.sum(function(x, *words, scale_in)))(x.astype(jnp.bfloat16))
    assert bf16.dtype == jnp.bfloat16


def test_transforms():
    x, words, scale_in, scale_out, bias, wanted = case([70, 33, 50], 6)
    args = *words, scale_in, scale_out, bias
    traced = chex.assert_max_traces(lambda x, *rest: op.binary_matmul(x, *rest), n=1)
    jitted = jax.jit(traced)
    assert_near(jitted(x, *args), wanted)
    jitted(x + 1, *args)
    assert_near(op.binary_matmul(x[0], *args), wanted[0])
    assert_near(op.binary_matmul(x.reshape(2, 3, 70), *args), wanted.reshape(2, 3, 50))
    shape = jax.eval_shape(op.binary_matmul, x.reshape(2, 3, 70), *args)
    assert (shape.shape, shape.dtype) == ((2, 3, 50), jnp.float32)
    assert_near(jax.checkpoint(op.binary_matmul)(x, *args), wanted)
    bare = op.binary_matmul(x, *words, implementation="xla")
    np.testing.assert_allclose((bare * scale_out).shape, (6, 50))
    with jax.enable_x64(True):
        got = op.binary_matmul(x, *args)
        assert got.dtype == jnp.float32
        assert_near(got, wanted)
        slope = jax.grad(lambda x: op.binary_matmul(x, *args).sum())(x)
        assert slope.dtype == jnp.float32


@pytest.mark.parametrize("implementation", ["xla", pytest.param("cpu", marks=needs_native)])
def test_vmap(implementation):
    product = functools.partial(op.binary_matmul, implementation=implementation)
    x, words, scale_in, scale_out, bias, wanted = case([70, 33, 50], 6)
    over_x = jax.vmap(lambda x: product(x, *words, scale_in, scale_out, bias))
    assert_near(over_x(x), wanted)
    assert_near(jax.vmap(over_x)(x.reshape(2, 3, 70)), wanted.reshape(2, 3, 50))
    other = [op.pack_signs(-np.asarray(op.unpack_signs(words[0], 70))), words[1]]
    stacked = [jnp.stack(pair) for pair in zip(words, other)]
    both = jax.vmap(lambda v, u: product(x, v, u, scale_in, scale_out))(*stacked)
    assert_near(both[0], wanted - bias)
    assert_near(both[1], bias - wanted)
    slopes = jax.vmap(jax.grad(lambda x: product(x, *words, scale_in).sum()))(x)
    np.testing.assert_allclose(slopes, jnp.broadcast_to(slopes[0], slopes.shape), rtol=1e-6)


def test_vmap_over_rows_reads_the_words_once():
    spec = jax.ShapeDtypeStruct
    args = spec((8, 64), jnp.bfloat16), spec((2, 128), jnp.uint32)
    for axes in ((0, None), (None, 0)):
        words = args[1] if axes[1] is None else spec((8, 2, 128), jnp.uint32)
        x = args[0] if axes[0] == 0 else spec((64,), jnp.bfloat16)
        text = levels.lower("cuda", jax.vmap(lambda x, w: op.sign_matmul(x, w), axes), x, words).as_text()
        assert ("binary_matmul_gpu" in text) == (
            axes[0] == 0
        )  # eight rows of one product, or eight of one row


SHARDED = """
import os, json
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from pallas_kernels import binary_matmul as op
rng = np.random.default_rng(0)
words = op.pack_signs(rng.choice([-1, 1], (64, 48)))
x, scale = jnp.asarray(rng.normal(size=(16, 64)), "f"), jnp.asarray(rng.normal(size=64), "f")
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
errors = []
for rows in (16, 64):
    x = jnp.asarray(rng.normal(size=(rows, 64)), "f")
    local = lambda x, w, s: op.sign_matmul(x, w, s)
    f = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    plain = op.sign_matmul(x, words, scale, implementation="xla")
    errors.append(float(jnp.abs(jax.jit(f)(x, words, scale) - plain).max()))
    loss = lambda g: lambda x, s: jnp.sum(jnp.sin(g(x, words, s) / 100))
    pairs = zip(jax.grad(loss(f), (0, 1))(x, scale), jax.grad(loss(local), (0, 1))(x, scale))
    errors += [float(jnp.abs(a - b).max()) for a, b in pairs]
print(json.dumps(errors))
"""


def test_shard_map():
    program = subprocess.run(
        [sys.executable, "-c", SHARDED],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    assert max(json.loads(program.stdout)) < 1e-3


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("rows", [4, 64])  # 1 and 16 a device
def test_kernels_inside_shard_map(platform, rows):
    args = shapes(rows, jnp.bfloat16, 256, 128, 384)[:3]
    specs = PartitionSpec("data"), PartitionSpec(), PartitionSpec()
    text = levels.lower_sharded(platform, op.binary_matmul, specs, specs[0], *args)
    assert f"{rows // 4}x256" in text
    slope = jax.grad(lambda *a: jnp.sum(op.binary_matmul(*a).astype(jnp.float32) ** 2))
    levels.lower_sharded(platform, slope, specs, specs[0], *args)


def shapes(rows, dtype, inputs=8192, rank=6336, outputs=28672):
    spec = jax.ShapeDtypeStruct
    return (
        spec((rows, inputs), dtype),
        spec((-(-inputs // 32), rank), jnp.uint32),
        spec((-(-rank // 32), outputs), jnp.uint32),
        spec((inputs,), jnp.bfloat16),
        spec((outputs,), jnp.bfloat16),
    )


@pytest.mark.parametrize(
    ("rows", "dtype", "expect"),
    [
        (1, jnp.bfloat16, "xor"),
        (4, jnp.float32, "xor"),
        (16, jnp.bfloat16, "mma.sync"),
        (512, jnp.float32, "wgmma"),
    ],
)
def test_gpu_code(rows, dtype, expect):
    kernels = levels.compile_gpu(op.binary_matmul, *shapes(rows, dtype), expect=(expect,))
    assert len(kernels) == 2
    odd = shapes(rows, dtype, inputs=8200, rank=6340, outputs=28670)
    levels.lower("cuda", op.binary_matmul, *odd)


@pytest.mark.parametrize(("rows", "dtype"), [(1, jnp.bfloat16), (40, jnp.float32)])
def test_tpu_code(rows, dtype):
    compiled = levels.compile_tpu(op.binary_matmul, *shapes(rows, dtype))
    assert compiled.as_text().count("tpu_custom_call") >= 2
    levels.compile_tpu(op.binary_matmul, *shapes(rows, dtype, inputs=8200, rank=6340, outputs=28670))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowering_with_x64_grad_and_vmap(platform):
    args = shapes(3, jnp.float32, 70, 33, 130)
    with jax.enable_x64(True):
        levels.lower(platform, op.binary_matmul, *args)
    slope = jax.grad(lambda x, *rest: jnp.sum(op.binary_matmul(x, *rest, implementation="pallas") ** 2))
    levels.lower(platform, slope, *args)
    batch = [jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in args]
    levels.lower(platform, jax.vmap(op.binary_matmul), *batch)


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_no_path_makes_the_dense_matrix(rows):
    args = shapes(rows, jnp.float32, 1024, 512, 2048)
    dense = 4 * 512 * (1024 + 2048)
    product = functools.partial(op.binary_matmul, implementation="xla")
    forward = jax.jit(product).lower(*args).compile()
    backward = jax.jit(jax.grad(lambda *a: product(*a).sum(), (0, 3, 4))).lower(*args).compile()
    own = 4 * rows * (1024 + 512 + 2048)  # x, and what is computed from it
    if rows == 64:  # for fewer XLA fuses the unpacking into slow sums
        unpacked = jax.jit(reference.binary_matmul).lower(*args).compile()
        assert unpacked.memory_analysis().temp_size_in_bytes > dense / 2
    assert forward.memory_analysis().temp_size_in_bytes < dense / 16 + 2 * own
    assert backward.memory_analysis().temp_size_in_bytes < dense / 16 + 6 * own


X, WORDS = np.ones((2, 40), "f"), np.zeros((2, 8), np.uint32)


@pytest.mark.parametrize(
    ("error", "message", "args", "options"),
    [
        (TypeError, "x must be float32 or bfloat16, not float16", (X.astype("e"), WORDS), {}),
        (TypeError, "x must be float32 or bfloat16, not int32", (X.astype("i"), WORDS), {}),
        (ValueError, "x must have an axis", (np.float32(1), WORDS), {}),
        (TypeError, "words must be uint32", (X, WORDS.astype("i")), {}),
        (ValueError, "words must have 2 axes", (X, WORDS[0]), {}),
        (ValueError, r"2 rows of words, but the last axis of x has 70", (np.ones((1, 70), "f"), WORDS), {}),
        (ValueError, r"scale_in must have shape \(40,\), not \(8,\)", (X, WORDS, np.ones(8, "f")), {}),
        (ValueError, r"scale_out must have shape \(8,\)", (X, WORDS, None, np.ones(9, "f")), {}),
        (TypeError, "bias must be floating", (X, WORDS, None, None, np.ones(8, "i")), {}),
        (ValueError, "implementation='cuda' is not known", (X, WORDS), {"implementation": "cuda"}),
        (NotImplementedError, "no NVIDIA GPU.*no TPU", (X, WORDS), {"implementation": "pallas"}),
        (NotImplementedError, "has no 'triton' form", (X, WORDS), {"implementation": "triton"}),
    ],
)
def test_bad_input(error, message, args, options):
    with pytest.raises(error, match=message):
        op.sign_matmul(*args, **options)


def test_bad_input_of_two_stages_and_of_packing():
    with pytest.raises(ValueError, match=r"u_words .* has 2 rows of words, but v_words's last axis has 8"):
        op.binary_matmul(X, WORDS, WORDS)
    with pytest.raises(ValueError, match=r"signs must be \+1 or -1, but 2 are not, such as 0"):
        op.pack_signs(np.array([1, 0, -1, 0]))
    with pytest.raises(ValueError, match="axis=1 is not one"):
        op.pack_signs(np.ones(3), axis=1)
    with pytest.raises(ValueError, match="size=65 takes 3 words"):
        op.unpack_signs(WORDS, 65)
    assert op.availability()[0] == "xla      yes"
    assert op.availability()[1].startswith("cpu      ")
    assert op.availability()[2].startswith("pallas   no: pallas_gpu: no NVIDIA GPU")


def test_bench_counts_bytes_and_writes_its_rows(tmp_path, capsys):
    case = bench.Case(1, 8192, 28672, 6336, "bfloat16")
    assert case.bits_per_weight == pytest.approx(0.997, abs=1e-3)
    moved = bench.bytes_moved(case)
    assert moved["dense"] == pytest.approx(2 * 8192 * 28672, rel=1e-3)
    assert moved["binary"] == pytest.approx(6336 * (8192 + 28672) / 8, rel=1e-2)
    assert bench.main(["--preset", "smoke", "--out", str(tmp_path / "rows.json")]) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["relative_error"] < 1e-5
    assert "rows   2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--preset", "gpu"])
