"""Run on 8 forced host devices: prints, as JSON, how LiMuon's factors are split, what a sharded update communicates and
how far sharded training is from one device. `test_two_point` judges it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np

from effml.optimize import Distribution, limuon, two_point_init, two_point_step
from effml.train import make_mesh
from tests.optimize.normuon_devices import collectives

ROWS, COLUMNS, RANK, OVERSAMPLING = 64, 96, 4, 4


def params() -> dict:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    kernel = lambda m, n: {"kernel": jax.random.normal(next(keys), (m, n)) / np.sqrt(m)}
    return {
        "up": kernel(ROWS, COLUMNS),
        "down": kernel(COLUMNS, ROWS),
        "gate": kernel(ROWS, COLUMNS),
        "head": kernel(ROWS, 8),
    }


def loss(params: dict, batch: jax.Array, rng: None) -> jax.Array:
    hidden = jnp.tanh(batch @ params["up"]["kernel"]) * (batch @ params["gate"]["kernel"])
    return jnp.mean(jnp.square(hidden @ params["down"]["kernel"] @ params["head"]["kernel"] - 1))


def elements(shape: str) -> int:
    """Of the largest array in an HLO result type such as f32[8,4]{1,0}."""
    sizes = [part.split("]")[0] for part in shape.split("[")[1:]]
    return max(int(np.prod([int(n) for n in size.split(",") if n])) for size in sizes)


def measure() -> dict:
    mesh = make_mesh({"fsdp": 8})
    options = {"beta": 0.2, "rank": RANK, "oversampling": OVERSAMPLING, "qr": "cholesky2"}
    shared = limuon(0.05, distribute=Distribution(mesh, "fsdp"), **options)
    alone = limuon(0.05, **options)
    state, one = two_point_init(params(), shared, mesh=mesh), two_point_init(params(), alone)
    step, one_step = two_point_step(loss, shared, mesh=mesh), two_point_step(loss, alone)
    batches = np.random.default_rng(1).normal(size=(3, 16, ROWS)).astype(np.float32)
    for batch in batches:
        state, _ = step(state, batch)
        one, _ = one_step(one, batch)
    factors = state.opt_state.inner_states["matrix"].inner_state[0].factors
    spec = lambda leaf: (
        [str(entry) for entry in leaf.sharding.spec] + ["None"] * (leaf.ndim - len(leaf.sharding.spec))
    )
    gradients = jax.device_put(params(), jax.tree.map(lambda leaf: leaf.sharding, state.params))
    update = jax.jit(lambda g, h, s, p: shared.update(g, s, p, prev_params_grad=h))
    found, _ = collectives(
        update.lower(gradients, gradients, state.opt_state, state.params).compile().as_text()
    )
    return {
        "u": spec(factors.u["up"]["kernel"]),
        "vt": spec(factors.vt["up"]["kernel"]),
        "s": spec(factors.s["up"]["kernel"]),
        "previous": spec(state.prev_params["up"]["kernel"]),
        "all_to_all": len(found.pop("all-to-all", [])),
        "largest_other": max(elements(shape) for shapes in found.values() for shape in shapes),
        "difference": max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params))
        ),
        "compilations": step.jitted._cache_size(),
    }


if __name__ == "__main__":
    assert len(jax.devices()) == 8, jax.devices()
    print(json.dumps(measure()))
