"""Products of few rows: native code and XLA against float64, and what happens where native code can't be built."""

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _native
from pallas_kernels import matvec as op
from pallas_kernels.matvec import cpu, matvec

needs_native = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no native code: {cpu.why_not()}")
IMPLEMENTATIONS = ["xla", pytest.param("cpu", marks=needs_native)]
# Tails of vectors, of chunks and of blocks; wide rows, many outputs, a single number.
SIZES = [(1, 1), (3, 5), (37, 16), (100, 37), (64, 4100), (520, 2051), (1030, 96), (5, 12000)]


def arrays(rows, inputs, outputs, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, inputs)).astype(dtype)
    return x, random.normal(size=(inputs, outputs)).astype(dtype)


def product(x, kernel):
    """In float64, and the largest error that float32 sums in any order can make."""
    x, kernel = (np.asarray(a).astype(np.float64) for a in (x, kernel))
    return x @ kernel, (x.shape[-1] + 4) * 2.0**-24 * (abs(x) @ abs(kernel)) + 1e-30


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_the_product_in_float64(implementation, dtype, transposed):
    for rows in (1, 2, 7, 13) if implementation == "cpu" else (2,):
        for inputs, outputs in SIZES if implementation == "cpu" else SIZES[3:5]:
            x, kernel = arrays(rows, inputs, outputs, jnp.dtype(dtype))
            lies = kernel.T.copy() if transposed else kernel
            y = matvec(x, lies, transposed=transposed, implementation=implementation)
            expected, bound = product(x, kernel)
            assert y.dtype == jnp.float32
            assert (abs(np.asarray(y) - expected) <= bound).all(), (rows, inputs, outputs)


@needs_native
def test_unaligned_widths_do_not_touch_their_neighbours():
    for outputs in range(1, 50):
        x, kernel = arrays(1, 33, outputs, seed=outputs)
        expected, bound = product(x, kernel)
        for transposed, lies in ((False, kernel), (True, kernel.T.copy())):
            y = np.asarray(cpu.matvec(jnp.asarray(x), jnp.asarray(lies), transposed=transposed))
            assert (abs(y - expected) <= bound).all(), outputs


@needs_native
def test_infinity_and_nan_go_where_they_belong():
    x, kernel = arrays(1, 600, 700)
    kernel[5, 3], kernel[599, 699] = np.inf, np.nan
    y = np.asarray(matvec(x, kernel, implementation="cpu"))[0]
    assert np.isinf(y[3])
    assert np.isnan(y[699])
    assert np.isfinite(np.delete(y, [3, 699])).all()


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_transformations_agree_with_the_plain_product(implementation):
    x, kernel = arrays(6, 20, 12)
    x = x.reshape(3, 2, 20)
    f = functools.partial(matvec, implementation=implementation)
    expected = x.astype(np.float64) @ kernel
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(f(x, kernel), expected)
    close(f(x[0, 0], kernel), expected[0, 0])
    close(jax.jit(f)(x, kernel), expected)
    close(jax.vmap(f, (0, None))(x, kernel), expected)
    close(jax.vmap(jax.vmap(f, (0, None)), (0, None))(x, kernel), expected)
    kernels = np.stack([kernel, 2 * kernel, -kernel])
    close(jax.jit(jax.vmap(f))(x, kernels), np.einsum("bri,bio->bro", x, kernels))
    close(jax.vmap(f, (None, 0))(x[0], kernels), np.einsum("ri,bio->bro", x[0], kernels))
    assert jax.eval_shape(f, x, kernel) == jax.ShapeDtypeStruct((3, 2, 12), jnp.float32)
    close(jax.lax.map(lambda row: f(row, kernel), x), expected)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_the_product(implementation, transposed):
    x, kernel = arrays(4, 20, 12)
    lies = kernel.T.copy() if transposed else kernel
    weights = np.random.default_rng(1).normal(size=(4, 12)).astype(np.float32)

    def loss(x, kernel):
        return (matvec(x, kernel, transposed=transposed, implementation=implementation) * weights).sum()

    expected = weights @ kernel.T, x.T @ weights
    for f in (loss, jax.checkpoint(loss)):
        dx, dk = jax.jit(jax.grad(f, (0, 1)))(x, lies)
        np.testing.assert_allclose(dx, expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dk.T if transposed else dk, expected[1], rtol=1e-4, atol=1e-5)
    by_row = jax.vmap(jax.grad(lambda x, w: (matvec(x, lies, transposed=transposed) * w).sum()))(x, weights)
    np.testing.assert_allclose(by_row, expected[0], rtol=1e-4, atol=1e-5)


@needs_native
def test_none_is_native_for_few_rows_alone():
    def calls_native(rows, dtype=jnp.float32, weights=jnp.float32, transposed=False):
        f = jax.jit(functools.partial(matvec, transposed=transposed))
        return "effml_matvec" in f.lower(jnp.ones((rows, 8), dtype), jnp.ones((8, 8), weights)).as_text()

    assert calls_native(2)
    assert not calls_native(3), "XLA's is the faster one"
    for options in ({"transposed": True}, {"weights": jnp.bfloat16}):
        assert calls_native(op.FEW_ROWS, **options)
        assert not calls_native(op.FEW_ROWS + 1, **options)
    assert not calls_native(1, jnp.float16)


def test_another_platform_gets_xla_from_none():
    arguments = jnp.ones((1, 8)), jnp.ones((8, 8))
    for platform in ("tpu", "cuda"):
        text = jax.jit(matvec).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        assert "effml_matvec" not in text
        assert "precision = [HIGHEST, HIGHEST]" in text


@needs_native
def test_a_second_call_does_not_trace_again():
    f = jax.jit(chex.assert_max_traces(lambda x, k: matvec(x, k), n=1))
    for _ in range(3):
        f(jnp.ones((1, 8)), jnp.ones((8, 8)))


@needs_native
def test_calls_from_several_threads_are_each_right():
    cases = [arrays(1, 576, 600 + 8 * i, seed=i) for i in range(4)]
    f = jax.jit(functools.partial(matvec, implementation="cpu"))
    expected = [np.asarray(f(x, k)) for x, k in cases]
    wrong = []

    def work(i):
        for _ in range(50):
            if not np.array_equal(np.asarray(f(*cases[i])), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("x", "kernel", "options", "error", "text"),
    [
        (np.ones((1, 3)), np.ones((4, 5)), {}, ValueError, r"x of shape \(1, 3\) must end with the 4 inputs"),
        (np.ones((1, 4)), np.ones((4, 5)), {"transposed": True}, ValueError, "the 5 inputs"),
        (np.ones((1, 4)), np.ones(4), {}, ValueError, "kernel of shape"),
        (np.ones((1, 4), int), np.ones((4, 5)), {}, TypeError, "x holds int32"),
        (np.ones((1, 4)), np.ones((4, 5)), {"implementation": "fast"}, ValueError, "'fast' is not known"),
        (
            np.ones((1, 4)),
            np.ones((4, 5)),
            {"implementation": "pallas"},
            NotImplementedError,
            "no 'pallas' form",
        ),
        (
            np.ones((1, 4), np.float16),
            np.ones((4, 5)),
            {"implementation": "cpu"},
            NotImplementedError,
            "float16",
        ),
        (np.ones((0, 4)), np.ones((4, 5)), {"implementation": "cpu"}, NotImplementedError, "is empty"),
    ],
)
def test_bad_input_is_refused_in_words(x, kernel, options, error, text):
    with pytest.raises(error, match=text):
        matvec(x, kernel, **options)


def test_empty_products_are_those_of_numpy():
    assert matvec(jnp.ones((0, 4)), jnp.ones((4, 5))).shape == (0, 5)
    assert matvec(jnp.ones((2, 0)), jnp.ones((0, 5))).tolist() == [[0.0] * 5] * 2


PROGRAM = """
import json, os, sys
import jax.numpy as jnp, numpy as np
from pallas_kernels.matvec import availability, matvec
random = np.random.default_rng(0)
x, kernel = (random.normal(size=s).astype(np.float32) for s in ((1, 576), (576, 1000)))
y = np.asarray(matvec(x, kernel))
print(json.dumps([availability()[1], y.tobytes().hex(), float(abs(y - x.astype(float) @ kernel).max())]))
"""


def start(cache, program=PROGRAM, **environment):
    environment = {**os.environ, "EFFML_CACHE": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )


def answer(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-2000:]
    return json.loads(out.splitlines()[-1])


@needs_native
def test_two_processes_build_at_once_and_leave_one_library(tmp_path):
    # A compiler that takes its time and then hands out the library that this process has.
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done; sleep 1; cp "{_native._cached()}" "$last"\n')
    compiler.chmod(0o755)
    processes = [start(tmp_path, CXX=str(compiler)) for _ in range(2)]
    answers = [answer(process) for process in processes]
    assert answers[0] == answers[1]
    assert answers[0][0] == "cpu      yes"
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]


@needs_native
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_bits_do_not_depend_on_the_number_of_threads():
    cache = _native.cache_folder().parent
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + PROGRAM
    assert answer(start(cache)) == answer(start(cache, one))


@pytest.mark.parametrize("broken", ["switched off", "no compiler", "compiler fails", "library damaged"])
def test_without_native_code_none_goes_on_and_the_reason_is_told(broken, tmp_path):
    environment = {}
    if broken == "switched off":
        environment = {"EFFML_NATIVE": "0"}
    elif broken == "no compiler":
        environment = {"PATH": str(tmp_path), "CXX": ""}
    else:
        compiler = tmp_path / "compiler"
        last = 'for last; do :; done; echo damaged > "$last"'
        compiler.write_text("#!/bin/sh\n" + ("echo error: no; exit 1" if "fails" in broken else last) + "\n")
        compiler.chmod(0o755)
        environment = {"CXX": str(compiler)}
    line, _, error = answer(start(tmp_path / "cache", **environment))
    texts = {
        "switched off": "EFFML_NATIVE=0",
        "no compiler": "no C++ compiler",
        "compiler fails": "compiler failed",
        "library damaged": "file too short",
    }
    assert texts[broken] in line
    assert line.startswith("cpu      no: ")
    assert error < 1e-3


@needs_native
def test_a_cache_that_cannot_be_written_builds_for_the_process_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "tmp").mkdir()
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done; cp "{_native._cached()}" "$last"\n')
    compiler.chmod(0o755)
    line, _, error = answer(start(tmp_path / "file", CXX=str(compiler), TMPDIR=str(tmp_path / "tmp")))
    assert line == "cpu      yes"
    assert error < 1e-3
    assert not list((tmp_path / "tmp").iterdir())
    compiler.write_text("#!/bin/sh\nexit 1\n")
    line, _, _ = answer(start(tmp_path / "file", CXX=str(compiler), TMPDIR=str(tmp_path / "tmp")))
    assert "exit status 1" in line
    assert not list((tmp_path / "tmp").iterdir())


def test_a_failed_build_is_told_in_full(tmp_path, monkeypatch):
    monkeypatch.setattr(_native, "sources", lambda: [tmp_path / "cpu.cc"])
    monkeypatch.setattr(_native, "_compiler", lambda: str(tmp_path / "compiler"))
    script = "#!/bin/sh\necho 'in file' >&2\necho 'cpu.cc:3:1: error: no such thing' >&2\nexit 1\n"
    (tmp_path / "compiler").write_text(script)
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setattr(Path, "relative_to", lambda self, other: self)
    with pytest.raises(_native.BuildError, match=r"failed: cpu.cc:3:1: error: no such thing") as caught:
        _native.build(tmp_path / "library.so")
    assert caught.value.output.splitlines()[0] == "in file"
    monkeypatch.setattr(_native, "_failure", lambda: caught.value)
    monkeypatch.setattr(_native, "_register", lambda targets: str(caught.value))
    lines = _native.describe()
    assert lines[0].startswith("compiler ")
    assert lines[1].startswith("not built: ")
    assert lines[2:] == ["  in file", "  cpu.cc:3:1: error: no such thing"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiler"]


@needs_native
@pytest.mark.parametrize(
    ("files", "groups", "cores"),
    [
        ({}, "0::/", 16),
        ({"cpu.max": "max 100000"}, "0::/", 16),
        ({"cpu.max": "250000 100000"}, "0::/", 2),
        ({"cpu.max": "50000 100000"}, "0::/", 1),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 3),
        ({"cpu.max": "300000 100000"}, "0::/not/mounted/here", 3),
        (
            {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/a\n0::/",
            4,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/", 16),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, "4:memory:/", 16),
    ],
)
def test_threads_keep_to_the_quota_of_a_container(files, groups, cores, tmp_path):
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "groups").write_text(groups + "\n")
    asked = _native._library().effml_cores(
        str(tmp_path / "root").encode(), str(tmp_path / "groups").encode(), 16
    )
    assert asked == cores


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, json, numpy as np, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from pallas_kernels.matvec import matvec, packed_matvec
random = np.random.default_rng(0)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
x, kernel = (jnp.asarray(random.normal(size=s), "f") for s in ((8, 64), (64, 48)))
codes = jnp.asarray(random.integers(0, 256, (48, 32), dtype=np.uint8))
packed = lambda x, scale, **how: packed_matvec(x, codes, scale, bits=4, **how)
errors = []
for f, weight in ((matvec, kernel), (packed, jnp.ones((48, 1)))):
    shared = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    errors.append(float(abs(jax.jit(shared)(x, weight) - f(x, weight, implementation="xla")).max()))
    loss = lambda f: lambda *arguments: jnp.sin(f(*arguments) / 50).sum()
    pairs = zip(*(jax.jit(jax.grad(loss(g), (0, 1)))(x, weight) for g in (shared, f)))
    errors += [float(abs(a - b).max()) for a, b in pairs]
print(json.dumps(errors))
"""


def test_it_works_on_local_arrays_inside_shard_map():
    assert max(answer(start(_native.cache_folder().parent, SHARDED))) < 1e-3
