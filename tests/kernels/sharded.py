"""Lowering a `shard_map` for two accelerators that are not there."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from tests.kernels import levels


def lower(platform: str, function: Any, in_specs: Any, out_specs: Any, *args: Any) -> str:
    """The program that each of two devices along the mesh axis `"heads"` gets, as text (L2)."""
    with levels.pretend(platform):
        device = jax.sharding.get_abstract_mesh().abstract_device
    mesh = AbstractMesh((2,), ("heads",), abstract_device=device)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    placed = [  # JAX 0.12 asks for it
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(args, in_specs, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(sharded).trace(*placed).lower(lowering_platforms=(platform,)).as_text()
