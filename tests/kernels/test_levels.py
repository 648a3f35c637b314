"""Each level refuses a kernel that it must refuse, and passes a sound one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from pallas_kernels import _dispatch
from pallas_kernels._parameters import gpu_parameters, tpu_parameters
from pallas_kernels._varying import typed_like
from tests.kernels import levels


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def call(body, x, parameters, **options):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=out, compiler_params=parameters, **options)(x)


def matmul(a, b, *, stages=2):
    def body(a_ref, b_ref, o_ref):
        def step(i, total):
            at = pl.ds(i * 64, 64)
            return total + lax.dot_general(
                a_ref[:, at], b_ref[at, :], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

        zero = jnp.zeros(o_ref.shape, jnp.float32)
        o_ref[...] = lax.fori_loop(0, a.shape[1] // 64, step, zero)

    out = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32)
    return pl.pallas_call(body, out_shape=out, compiler_params=gpu_parameters(4, stages))(a, b)


def copy_in(x_ref, o_ref, scratch, semaphore, *, wait_first):
    copy = pltpu.make_async_copy(x_ref, scratch, semaphore)
    copy.start()
    if wait_first:
        copy.wait()
    o_ref[...] = scratch[...]
    if not wait_first:
        copy.wait()


def copied(x, interpret, wait_first):
    return pl.pallas_call(
        functools.partial(copy_in, wait_first=wait_first),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=interpret,
    )(x)


def test_reading_before_a_copy_has_ended_is_a_race():
    x = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
    with levels.race_checked() as interpret:
        np.testing.assert_array_equal(copied(x, interpret, True), x)
    with pytest.raises(AssertionError, match="data race"), levels.race_checked() as interpret:
        jax.block_until_ready(copied(x, interpret, False))


def test_the_race_check_refuses_to_watch_nothing():
    with pytest.raises(AssertionError, match="nothing ran"), levels.race_checked():
        pass


def test_an_output_that_is_never_written_shows():
    def nothing(x_ref, o_ref):
        del x_ref, o_ref

    x = jnp.ones((8, 128))
    assert np.isnan(call(nothing, x, gpu_parameters(4, 1), interpret=True)).all()


def test_lowering_refuses_sizes_that_interpret_mode_takes():
    x = jnp.ones((24, 20))
    run = functools.partial(call, double, parameters=gpu_parameters(4, 1))
    np.testing.assert_array_equal(run(x, interpret=True), 2 * x)
    with pytest.raises(ValueError, match=r"[Pp]ower.* of (2|two)"):
        levels.lower("cuda", run, x)
    levels.lower("cuda", run, jnp.ones((32, 16)))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowering_refuses_a_program_without_a_kernel(platform):
    with pytest.raises(AssertionError, match="no Pallas kernel"):
        levels.lower(platform, lambda x: x + 1, jnp.ones(8))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_local_arrays_hold_a_kernel_that_says_how_its_output_varies(platform):
    x, specs = jnp.ones((64, 128)), PartitionSpec("data")
    parameters = gpu_parameters(4, 1) if platform == "cuda" else tpu_parameters()

    def varying(x):
        return pl.pallas_call(double, out_shape=typed_like(x.shape, x.dtype, x), compiler_params=parameters)(
            x
        )

    assert "16x128" in levels.lower_sharded(platform, varying, (specs,), specs, x)
    with pytest.raises(AssertionError, match="no Pallas kernel"):
        levels.lower_sharded(platform, lambda x: x + 1, (specs,), specs, x)
    with pytest.raises(ValueError, match=r"vary|varying|vma|manual_axis_type"):
        levels.lower_sharded(platform, lambda x: call(double, x, parameters), (specs,), specs, x)


def test_gpu_code_has_the_instructions_and_the_memory_that_are_asserted():
    small = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    (kernel,) = levels.compile_gpu(matmul, *small, expect=("mma",))
    assert kernel.machine_code_bytes > 1000
    with pytest.raises(AssertionError, match="no popc instruction"):
        levels.compile_gpu(matmul, *small, expect=("popc",))


def test_gpu_code_that_wants_more_shared_memory_than_there_is_is_refused():
    large = jax.ShapeDtypeStruct((256, 512), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        levels.compile_gpu(functools.partial(matmul, stages=4), *large)


def test_tpu_program_that_does_not_fit_vmem_is_refused():
    def with_scratch(x, rows):
        def body(x_ref, o_ref, scratch):
            scratch[:8, :] = x_ref[...]
            o_ref[...] = scratch[:8, :]

        return call(body, x, tpu_parameters(), scratch_shapes=[pltpu.VMEM((rows, 128), jnp.float32)])

    x = jnp.ones((8, 128))
    compiled = levels.compile_tpu(functools.partial(with_scratch, rows=1024), x)
    assert "tpu_custom_call" in compiled.as_text()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        levels.compile_tpu(functools.partial(with_scratch, rows=1 << 20), x)


FORMS = {
    "xla": lambda x: x + 1,
    "pallas_gpu": functools.partial(call, double, parameters=gpu_parameters(4, 1)),
    "pallas_tpu": functools.partial(call, double, parameters=tpu_parameters()),
}


def test_without_a_name_each_platform_gets_its_own_form():
    x = jnp.ones((8, 128))
    np.testing.assert_array_equal(_dispatch.choose(None, FORMS)(x), x + 1)
    for platform in ("cuda", "tpu"):
        levels.lower(platform, lambda x: _dispatch.choose(None, FORMS)(x), x)
        levels.lower(platform, lambda x: _dispatch.choose("pallas", FORMS)(x), x)
        with pytest.raises(AssertionError, match="no Pallas kernel"):
            levels.lower(platform, lambda x: _dispatch.choose("xla", FORMS)(x), x)
        reasons = {"pallas_gpu": "too small", "pallas_tpu": "too small"}
        with pytest.raises(AssertionError, match="no Pallas kernel"):
            levels.lower(platform, lambda x, r=reasons: _dispatch.choose(None, FORMS, r)(x), x)
        with pytest.raises(NotImplementedError, match="too small"):
            levels.lower(platform, lambda x, r=reasons: _dispatch.choose("pallas", FORMS, r)(x), x)


def test_a_named_form_that_cannot_run_gives_every_reason():
    with pytest.raises(
        NotImplementedError, match=r"pallas_gpu: no NVIDIA GPU .* and odd; pallas_tpu: no TPU"
    ):
        _dispatch.choose("pallas", FORMS, {"pallas_gpu": "odd"})
    with pytest.raises(NotImplementedError, match="this op has no 'triton' form"):
        _dispatch.choose("triton", FORMS)
    with pytest.raises(NotImplementedError, match="no NVIDIA GPU"):
        _dispatch.choose("triton", {**FORMS, "triton": FORMS["xla"]})
    with pytest.raises(ValueError, match="implementation='cuda' is not known"):
        _dispatch.choose("cuda", FORMS)


def test_the_native_form_is_taken_on_a_cpu_and_only_there():
    forms = {**FORMS, "cpu": lambda x: x + 5}
    x = jnp.ones((8, 128))
    np.testing.assert_array_equal(jax.jit(_dispatch.choose(None, forms))(x), x + 5)
    np.testing.assert_array_equal(jax.vmap(_dispatch.choose(None, forms))(x), x + 5)
    np.testing.assert_array_equal(_dispatch.choose(None, forms, {"cpu": "no compiler"})(x), x + 1)
    levels.lower("tpu", lambda x: _dispatch.choose(None, forms)(x), x)
