"""Four proofs of a kernel that need no accelerator, and what each can't see.

| level | function | proves | can't see |
|---|---|---|---|
| L1 | `interpreted`, `race_checked` | the numbers; for TPU forms no race and no access outside an array | limits of the compilers |
| L2 | `lower`, `lower_sharded` | that Pallas takes the kernel (power-of-two sizes, supported operations) | memory |
| L3 | `compile_gpu` | sm_90 machine code, its shared memory, its instructions | XLA's own Triton, speed |
| L4 | `compile_tpu` | a TPU v5e program that fits VMEM | speed |

`test_levels.py` holds a kernel for each level that must be refused. L3 and L4 skip, with the reason, where the
packages of the extra `kernel-ci` are absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, SingleDeviceSharding

SHARED_MEMORY = 227 * 1024  # bytes that one block may have on compute capability 9.0
TARGETS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}


def pretend(platform: str, **axes: int) -> Any:
    """A context whose current mesh is of `"cuda"` (H200) or `"tpu"` (v5e) devices: one, or `axes` of them by name."""
    kind, cores, name = {"cuda": ("NVIDIA H200", 132, "gpu"), "tpu": ("TPU v5 lite", 1, "tpu")}[platform]
    try:
        device = AbstractDevice(device_kind=kind, num_cores=cores, platform=name)
    except TypeError:  # without the field before JAX 0.10.2
        device = AbstractDevice(device_kind=kind, num_cores=cores)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(tuple(axes.values()), tuple(axes), abstract_device=device)
    )


@contextlib.contextmanager
def race_checked() -> Iterator[Any]:
    """L1 for TPU forms: hands out the `interpret=` that watches memory, and fails if there was a race.

    The outputs must be ready (`block_until_ready`) before the block ends. Reads outside an array raise by themselves.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    pltpu.reset_tpu_interpret_mode_state()
    try:
        try:
            yield pltpu.InterpretParams(detect_races=True)
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError as error:  # JAX 0.12 raises where 0.10 only notes it
            if "RACE DETECTED" in str(error):
                raise AssertionError("the kernel has a data race") from error
            raise
        found = interpret_pallas_call.races
        assert found is not None, "nothing ran in the TPU interpreter"
        assert not found.races_found, "the kernel has a data race"
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def lower(platform: str, function: Any, *args: Any) -> Any:
    """L2: the lowered call, which must hold a kernel of that platform.

    Args:
        platform: `"cuda"` or `"tpu"`.
        function: of arrays; a launcher, or a public function under its default implementation.
        args: arrays or `jax.ShapeDtypeStruct`.

    Returns:
        `jax.stages.Lowered`.
    """
    with pretend(platform), _quiet():
        # The trace cache does not know of the mesh when shapes are the same and the function is already jitted.
        lowered = jax.jit(lambda *a: function(*a)).trace(*args).lower(lowering_platforms=(platform,))
    _check_targets(platform, lowered.as_text())
    return lowered


def lower_sharded(platform: str, function: Any, in_specs: Any, out_specs: Any, *args: Any) -> str:
    """L2 inside `jax.shard_map`: the text of the call on local arrays of four devices, along the mesh axis `data`.

    Args:
        platform: `"cuda"` or `"tpu"`.
        function: of local arrays.
        in_specs: a `PartitionSpec` for each array.
        out_specs: of the results.
        args: whole arrays or `jax.ShapeDtypeStruct`.
    """
    with pretend(platform, data=4), _quiet():
        mesh = jax.sharding.get_abstract_mesh()
        sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        placed = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
            for a, spec in zip(args, in_specs, strict=True)
        ]
        text = jax.jit(sharded).trace(*placed).lower(lowering_platforms=(platform,)).as_text()
    assert "manual_computation" in text, "the program has no local arrays"
    _check_targets(platform, text)
    return text


def _check_targets(platform: str, text: str) -> None:
    other = TARGETS["tpu" if platform == "cuda" else "cuda"]
    assert TARGETS[platform] in text, f"no Pallas kernel in the program lowered for {platform}"
    assert other not in text, "a kernel of the other platform is in the program"


@dataclasses.dataclass(frozen=True)
class GpuKernel:
    """One kernel in machine code."""

    name: str
    ptx: str
    machine_code_bytes: int
    shared_memory: int  # bytes a block
    num_warps: int

    def has(self, instruction: str) -> bool:
        """Whether the PTX holds an instruction that begins so, such as `mma` (also `wgmma`) or `popc`."""
        pattern = (
            r"\b(wgmma\.mma_async|mma\.sync)" if instruction == "mma" else rf"\b{re.escape(instruction)}"
        )
        return re.search(pattern, self.ptx) is not None


def compile_gpu(function: Any, *args: Any, expect: tuple[str, ...] = ()) -> list[GpuKernel]:
    """L3: sm_90 machine code of every kernel in a call, by the triton wheel.

    Args:
        function: of arrays.
        args: arrays or `jax.ShapeDtypeStruct`.
        expect: instructions that at least one kernel must hold, such as `("mma",)`.

    Returns:
        The kernels in program order; each within the shared memory of a block.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("L3 needs the triton wheel: pip install 'effml[kernel-ci]'")
    kernels = [_to_machine_code(*kernel) for kernel in _triton_kernels(lower("cuda", function, *args))]
    for kernel in kernels:
        assert kernel.shared_memory <= SHARED_MEMORY, (
            f"{kernel.name} wants {kernel.shared_memory} bytes of shared memory, a block has {SHARED_MEMORY}"
        )
    for instruction in expect:
        assert any(k.has(instruction) for k in kernels), f"no {instruction} instruction in any kernel"
    return kernels


def compile_tpu(function: Any, *args: Any) -> Any:
    """L4: the whole program compiled for one TPU v5e by libtpu.

    Args:
        function: of arrays.
        args: arrays or `jax.ShapeDtypeStruct`.

    Returns:
        `jax.stages.Compiled`; `.memory_analysis()` knows the bytes.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("L4 needs the libtpu wheel: pip install 'effml[kernel-ci]'")
    where = SingleDeviceSharding(_tpu_device())
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), args)
    lowered = lower("tpu", function, *specs)
    with _quiet():
        return lowered.compile()


@functools.cache
def _tpu_device() -> Any:
    from jax.experimental import topologies

    # libtpu reads these once, when it is loaded: no TPU host is here, and other processes may compile too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        # A compiler without a client can't load what the cache holds; it compiles again.
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")
        yield


def _triton_kernels(lowered: Any) -> list[tuple[bytes, str, int, int]]:
    """(Triton IR as bytecode, name, warps, stages) of every kernel call in a lowered program."""
    from jax._src.lib.mlir import ir

    found = []

    def walk(operation: Any) -> None:
        for region in operation.regions:
            for block in region:
                for inner in block.operations:
                    if inner.operation.name == "stablehlo.custom_call":
                        attributes = inner.operation.attributes
                        if "triton" in str(attributes["call_target_name"]):
                            key = (
                                "mhlo.backend_config"
                                if "mhlo.backend_config" in attributes
                                else "backend_config"
                            )
                            config = ir.DictAttr(attributes[key])
                            found.append(
                                (
                                    ir.StringAttr(config["ir"]).value_bytes,
                                    ir.StringAttr(config["name"]).value,
                                    ir.IntegerAttr(config["num_warps"]).value,
                                    ir.IntegerAttr(config["num_stages"]).value,
                                )
                            )
                    walk(inner.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return found


def _to_machine_code(bytecode: bytes, name: str, num_warps: int, num_stages: int) -> GpuKernel:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as XLA's own Triton; unset, it warns
    import triton.compiler
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax._src.lib.triton import dialect
    from triton.backends.compiler import GPUTarget

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context:
        text = ir.Module.parse(bytecode).operation.get_asm()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"{name}.ttir"
        path.write_text(text)
        compiled = triton.compiler.compile(
            str(path),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
    return GpuKernel(
        name, compiled.asm["ptx"], len(compiled.asm["cubin"]), compiled.metadata.shared, num_warps
    )
