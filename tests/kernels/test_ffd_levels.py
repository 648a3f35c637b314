"""The four levels of proof of the decoding kernels that need no accelerator (see `levels`)."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import ffd_decode as op
from tests.kernels import levels, sharded
from tests.kernels.ffd_cases import Oracle, call, case, check
from tests.kernels.test_ffd_transforms import in_a_process


def test_tpu_kernel_has_no_race():
    arrays = case(8, batch=1, kv_heads=1, block=32, blocks=9, counts=[9], tail=0)
    threshold = Oracle(arrays).threshold("pseudo", 0.5).reshape(1, 3).astype("f")
    with levels.race_checked() as interpret:
        got = jax.block_until_ready(
            call("pallas_tpu", {**arrays, "threshold": threshold}, {"num_splits": 2}, interpret)
        )
    assert 0 < check(got, {**arrays, "threshold": threshold}, {}).mean() < 1


def test_triton_kernel_in_its_interpreter():
    pytest.importorskip("triton", reason="needs the triton wheel: pip install 'effml[kernel-ci]'")
    shares = in_a_process("-m", "tests.kernels.ffd_triton", TRITON_INTERPRET="1")
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
    odd = specs(group=20, d=80, dv=40, block=32, blocks=13, bits=4, dtype=jnp.float32)
    levels.compile_tpu(certified, *odd)


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
def test_lowering_inside_shard_map(platform):
    heads = P(None, "heads")
    args = specs(group=3, d=32, dv=32, block=32, blocks=4)
    text = sharded.lower(platform, decode, (heads,) * 7 + (P(), P()), heads, *args)
    assert text.count(levels.TARGETS[platform]) == 1


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowering_with_x64_grad_and_vmap(platform):
    args = specs(group=3, d=32, dv=32, block=32, blocks=4)
    with jax.enable_x64(True):
        levels.lower(platform, decode, *args)
    loss = lambda q, *rest: jnp.sum(decode(q, *rest, implementation="pallas").astype(jnp.float32) ** 2)
    levels.lower(platform, jax.grad(loss), *args)
    levels.lower(platform, jax.vmap(decode), *(jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in args))
