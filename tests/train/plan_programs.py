"""Programs that test_plan.py runs in processes with devices of their own; each prints one JSON object at the end."""

from __future__ import annotations

import functools
import json
import sys

TINY = {
    "vocab_size": 64,
    "width": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_width": 64,
    "tied_head": False,
}


def host() -> dict:
    """Eight forced host devices: bytes, and that gathering weights changes where they are and not what is computed."""
    import jax
    import numpy as np
    import optax

    from effml import train
    from effml.nn.transformer import TransformerConfig, dense_linear, init_params, next_token_loss
    from effml.train import plan

    mesh = plan.planning_mesh({"data": 2, "fsdp": 4}, plan.parse_topology("cpu:8"))
    report: dict = {}
    config = TransformerConfig(**TINY)
    loss, init = plan.language_model(config, mesh, compute_dtype="float32")
    shapes = plan.token_batch(8, 16)
    report["plan"] = plan.plan_step(loss, init, optax.adam(1e-3), shapes, mesh, platform="cpu").to_dict()
    lowered = plan.plan_step(loss, init, optax.adam(1e-3), shapes, mesh, platform="cuda", only_lower=True)
    report["lowered"] = lowered.to_dict()
    try:
        plan.plan_step(loss, init, optax.adam(1e-3), plan.token_batch(6, 16), mesh, platform="cpu")
    except ValueError as error:
        report["rows"] = str(error)
    try:
        plan.load_devices(plan.parse_topology("cpu:16"))
    except ValueError as error:
        report["too_few"] = str(error)

    plain = functools.partial(next_token_loss, config=config)
    init = functools.partial(init_params, config=config, scanned=True)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 64, (8, 17)).astype(np.int32),
        "weights": rng.random((8, 16)).astype("f"),
    }
    results = []
    for where in (None, train.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})):
        optimizer = optax.sgd(1.0)
        loss = plain if where is None else train.fsdp_loss(plain, where, linear=dense_linear)
        state = train.init_state(jax.random.key(0), init, optimizer, mesh=where)
        before = jax.device_get(state.params)
        state, metrics = train.make_step(loss, optimizer, mesh=where)(state, batch)
        gradients = jax.tree.map(np.subtract, before, jax.device_get(state.params))
        results.append((float(metrics["loss"]), gradients))
    (one, ours), (many, theirs) = results
    report["losses"] = [one, many]
    report["largest_difference"] = max(
        float(np.abs(a - b).max() / np.abs(a).max())
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    )
    return report


def tpu() -> dict:
    """Four TPU chips that are not there."""
    import jax
    import jax.numpy as jnp
    import optax

    from effml.nn.transformer import TransformerConfig
    from effml.train import plan

    mesh = plan.planning_mesh({"data": 2, "fsdp": 2}, plan.parse_topology("v5e:2x2"))
    config = TransformerConfig(256, 256, 3, 4, 512, tied_head=False)
    loss, init = plan.language_model(config, mesh)
    made = plan.plan_step(loss, init, optax.sgd(1e-3), plan.token_batch(4, 128), mesh)
    report: dict = {"tiny": made.to_dict()}
    large = lambda params, batch: jnp.sum(params["w"] * batch["x"].sum())
    initial = lambda key: {"w": jnp.zeros((6, 1024, 1024, 1024))}
    try:
        batch = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
        plan.plan_step(
            large,
            initial,
            optax.sgd(1e-3),
            batch,
            plan.planning_mesh({"data": 4}, plan.parse_topology("v5e:2x2")),
        )
    except plan.DoesNotFit as error:
        report["large"] = [str(error), error.needed, error.available]
    try:
        plan.load_devices(plan.parse_topology("v5e:3x7"))
    except ValueError as error:
        report["refused"] = str(error)
    return report


if __name__ == "__main__":
    print(json.dumps({"host": host, "tpu": tpu}[sys.argv[1]]()))
