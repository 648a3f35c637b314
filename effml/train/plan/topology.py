"""Devices that are not here: what to compile for, and what the process needs before JAX starts.

| name | devices | needs |
|---|---|---|
| `v5e:16x16` (also `v4`, `v5p`, `v6e`) | TPU chips in a torus of these sizes | the libtpu wheel that fits jaxlib |
| `cpu:64` | forced host devices | nothing |
| `cuda:4x8` | GPUs, hosts × devices of each | the CUDA plugin; without it the step is only lowered |

XLA's CPU compiler widens bfloat16 collectives to float32, has no reduce-scatter and does not know its peak: take
bytes of arguments and which collectives there are from `cpu`, not their sizes.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from effml._validate import missing_package, one_of

__all__ = ["PLATFORMS", "Topology", "environment", "load_devices", "parse_topology"]

_TPU = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}  # number of axes of the torus
PLATFORMS: tuple[str, ...] = (*_TPU, "cpu", "cuda")

# Only these sizes of one GPU are read by the compiler. Public figures of an H200; not read off a card.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 149000000000 cuda_compute_capability { major: 9 }
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True)
class Topology:
    """A parsed name.

    Attributes:
        name: as given.
        platform: `tpu`, `cpu` or `cuda`, as JAX calls them.
        kind: what stands before the colon.
        sizes: what stands behind it.
    """

    name: str
    platform: str
    kind: str
    sizes: tuple[int, ...]

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def only_lower(self) -> bool:
        """Whether no compiler for it is installed: the step is then lowered on host devices that stand in."""
        return self.platform == "cuda" and not _cuda_plugin()


def parse_topology(name: str) -> Topology:
    """Reads a topology's name; needs no JAX.

    Args:
        name: such as `"v5e:16x16"`, `"cpu:64"` or `"cuda:4x8"`.

    Returns:
        The topology.

    Raises:
        ValueError: for a name of another form, an unknown kind (with the nearest known one), or sizes that the kind
            can't have.

    Example:
        >>> parse_topology("v5e:4x4").device_count
        16
    """
    kind, colon, sizes = name.partition(":")
    one_of("topology kind", kind, PLATFORMS)
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        raise ValueError(f"topology={name!r} must be a kind and sizes, such as v5e:16x16, cpu:64 or cuda:4x8")
    axes = tuple(map(int, sizes.split("x")))
    if kind in _TPU and len(axes) != _TPU[kind]:
        example = "x".join(["2"] * _TPU[kind])
        raise ValueError(
            f"topology={name!r} has {len(axes)} sizes, but {kind} chips form a torus of {_TPU[kind]} axes, "
            f"such as {kind}:{example}"
        )
    if kind == "cpu" and len(axes) != 1:
        raise ValueError(f"topology={name!r}: host devices are only counted, such as cpu:64")
    if kind == "cuda" and len(axes) > 2:
        raise ValueError(f"topology={name!r} must be devices or hosts x devices, such as cuda:8 or cuda:4x8")
    return Topology(name, "tpu" if kind in _TPU else kind, kind, axes)


def environment(topology: Topology, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that a process needs before it imports JAX.

    Args:
        topology: what to compile for.
        inherited: the environment to add them to; None is this process's.

    Returns:
        The whole environment, for `subprocess.run(..., env=...)`.

    Example:
        >>> environment(parse_topology("cpu:8"), {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"})["XLA_FLAGS"]
        '--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=8'
    """
    variables = dict(os.environ if inherited is None else inherited)
    # A program out of a cache has no text to read, and no time to compile.
    variables |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if topology.platform == "cpu" or topology.only_lower:
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", variables.get("XLA_FLAGS", ""))
        flags = f"{flags.strip()} --xla_force_host_platform_device_count={topology.device_count}"
        variables["XLA_FLAGS"] = flags.strip()
    if topology.platform == "tpu":
        # No host of a TPU is here: nothing may ask the cloud's metadata server, and several plans may run at once.
        variables |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    if topology.platform == "cuda":
        variables["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # or the plugin wants a driver
    return variables


def check_installed(topology: Topology) -> None:
    """Raises `ImportError` with the pip line if the compiler for a topology is absent; needs no JAX."""
    if topology.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise missing_package("libtpu", "pip install 'effml[kernel-ci]'", f"plan for {topology.name}")


def _cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in ("12", "13"))


def load_devices(topology: Topology) -> list[Any]:
    """The devices of a topology, in a process that was started with its `environment`.

    Args:
        topology: what to compile for.

    Returns:
        Devices to build a mesh of (`effml.train.make_mesh`).

    Raises:
        ImportError: if the compiler is not installed.
        ValueError: if the compiler refuses the topology, or the process has other devices.

    Example:
        >>> len(load_devices(parse_topology("cpu:1")))
        1
    """
    import jax
    from jax.experimental import topologies

    check_installed(topology)
    if topology.platform == "cpu" or topology.only_lower:
        devices = jax.devices("cpu")
        if len(devices) < topology.device_count:
            raise ValueError(
                f"topology={topology.name!r} needs {topology.device_count} host devices, but this process has "
                f"{len(devices)}; set the variables of effml.train.plan.environment before jax starts"
            )
        return devices[: topology.device_count]
    options = {}
    if topology.platform == "cuda":
        hosts = (1,) * (2 - len(topology.sizes)) + topology.sizes
        options = {"topology": "x".join(map(str, (1, *hosts))), "target_config": _H200}
    try:
        found = topologies.get_topology_desc(
            platform=topology.platform, topology_name=topology.name, **options
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"topology={topology.name!r} is refused by the compiler: {' '.join(str(error).split())}"
        ) from None
    return list(found.devices)
