"""Programs that the tests of this folder run in processes of their own; each prints one JSON object at the end."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from pathlib import Path


def _parts():
    import jax
    import numpy as np
    import optax

    from effml.nn.transformer import TransformerConfig, init_params, next_token_loss

    config = TransformerConfig(
        vocab_size=64, width=32, num_layers=1, num_heads=4, num_kv_heads=2, mlp_width=64
    )
    optimizer = optax.adam(1e-2)
    loss = functools.partial(next_token_loss, config=config)
    initial = functools.partial(init_params, config=config)

    def batch(i, rows=16):
        rng = np.random.default_rng(i)
        return {
            "tokens": ((rng.integers(0, 64, (rows, 1)) + 5 * np.arange(9)) % 64).astype(np.int32),
            "weights": (rng.random((rows, 8)) < 0.7).astype(np.float32),
        }

    return jax.random.key(3), initial, loss, optimizer, batch


def _trajectory(mesh, batches, steps, state=None, **options):
    from effml import train

    key, initial, loss, optimizer, _ = _parts()
    optimizer = options.pop("optimizer", optimizer)
    if options.pop("scanned", False):
        initial = functools.partial(initial, scanned=True)
    step = train.make_step(loss, optimizer, mesh=mesh, **options)
    state = train.init_state(key, initial, optimizer, mesh=mesh) if state is None else state
    losses = []
    for i in range(steps):
        state, metrics = step(state, batches[i])
        losses.append(float(metrics["loss"]))
    return state, losses, step


def devices(two_process_checkpoint: str, folder: str) -> dict:
    """Trains on meshes of 8 devices and on one."""
    import jax
    import numpy as np

    from effml import train

    key, initial, loss, optimizer, make_batch = _parts()
    batches = [make_batch(i) for i in range(5)]
    report: dict = {"devices": jax.device_count(), "losses": {}, "compilations": {}}
    _, report["losses"]["one"], _ = _trajectory(None, batches, 5)
    for name, options in {
        "data=8": {},
        "data=4,fsdp=2": {"accumulate": 2, "scanned": True},
        "data=2,fsdp=2,tensor=2": {},
    }.items():
        mesh = train.make_mesh(train.parse_mesh(name))
        begin, _, _ = _trajectory(mesh, batches, 0, **options)
        places = jax.tree.map(lambda a: a.sharding, begin)
        state, report["losses"][name], step = _trajectory(mesh, batches, 5, **options)
        assert jax.tree.map(lambda a: a.sharding, state) == places
        report["compilations"][name] = step.compilations()
    three = train.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    state = train.init_state(key, initial, optimizer, mesh=three)
    layer = state.params["layers"][0]
    moment = state.optimizer_state[0].mu["layers"][0]["mlp"]["down"]["kernel"]
    report["specs"] = {
        "query": str(tuple(layer["attention"]["query"]["kernel"].sharding.spec)),
        "output": str(tuple(layer["attention"]["output"]["kernel"].sharding.spec)),
        "up": str(tuple(layer["mlp"]["up"]["kernel"].sharding.spec)),
        "down": str(tuple(layer["mlp"]["down"]["kernel"].sharding.spec)),
        "moment": str(tuple(moment.sharding.spec)),
        "norm": str(tuple(layer["mlp_norm"]["scale"].sharding.spec)),
        "table": str(tuple(state.params["embedding"]["table"].sharding.spec)[:1]),
    }
    report["rows_per_device"] = [
        shard.data.shape[0] for shard in train.to_global(batches[0], three)["tokens"].addressable_shards
    ]
    eval_step = train.make_eval_step(loss, mesh=three)
    one = jax.device_put(jax.device_get(state.params), jax.devices()[0])
    report["evaluation"] = [
        train.evaluate(eval_step, state.params, batches)["nats_per_token"],
        train.evaluate(train.make_eval_step(loss), one, batches)["nats_per_token"],
    ]
    given = train.init_state(key, one, optimizer, mesh=three)
    report["given_is_placed"] = all(
        a.sharding == b.sharding and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(given.params), jax.tree.leaves(state.params))
    )

    # A checkpoint of one mesh goes on on another, and on one device.
    state, _, _ = _trajectory(three, batches, 3)
    train.Checkpoints(folder).save(state)
    rest = [batches[3], batches[4]]
    report["moved"] = {}
    for name, mesh in {"data=8": train.make_mesh({"data": 8}), "one": None}.items():
        restored, _ = train.Checkpoints(folder).restore(train.init_state(key, initial, optimizer, mesh=mesh))
        report["moved"][name] = _trajectory(mesh, rest, 2, state=restored)[1]

    errors = {}
    for name, make in {
        "size": lambda: train.make_mesh({"data": 3}),
        "batch": lambda: _trajectory(three, [make_batch(0, rows=6)], 1),
        "accumulate": lambda: _trajectory(three, [make_batch(0, rows=4)], 1, accumulate=2),
    }.items():
        try:
            make()
        except ValueError as error:
            errors[name] = str(error)
    example = train.init_state(key, initial, optimizer)
    checkpoints = train.Checkpoints(two_process_checkpoint)
    try:
        checkpoints.restore(example)
    except ValueError as error:
        errors["processes"] = str(error)
    restored, data_state = checkpoints.restore(example, require_data=False)
    report["errors"] = errors
    report["restored"] = [int(restored.step), data_state]
    report["after_two_processes"] = _trajectory(None, rest, 2, state=restored)[1]
    return report


class _Rows:
    """The share of each batch that belongs to this process, with a position."""

    def __init__(self, batches, index, count):
        self.batches, self.index, self.count, self.next = batches, index, count, 0

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.batches[self.next]
        self.next += 1
        share = len(batch["tokens"]) // self.count
        return {k: v[self.index * share : (self.index + 1) * share] for k, v in batch.items()}

    def get_state(self):
        return {"next_index": self.next, "process": self.index}

    def set_state(self, state):
        assert state["process"] == self.index
        self.next = state["next_index"]


def process(folder: str) -> dict:
    """One of two processes: three steps, a checkpoint, the rest; then the same again from the checkpoint."""
    import jax

    from effml import train

    several = train.initialize_distributed()
    key, initial, loss, optimizer, make_batch = _parts()
    index, count = jax.process_index(), jax.process_count()
    batches = [make_batch(i) for i in range(5)]
    mesh = train.make_mesh({"data": 2, "fsdp": 2})
    step = train.make_step(loss, optimizer, mesh=mesh)

    def run(steps, resume=False, interrupt_at=None, where="checkpoints", **options):
        def on_progress(update):
            if update.step == interrupt_at and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        return train.fit(
            step,
            train.init_state(key, initial, optimizer, mesh=mesh),
            _Rows(batches, index, count),
            steps=steps,
            checkpoints=train.Checkpoints(Path(folder, where)),
            resume=resume,
            log_every=2,
            writers=[train.JsonLinesWriter(Path(folder, f"{where}.jsonl"))],
            on_progress=on_progress,
            **options,
        )

    run(3)
    if index == 0:
        shutil.copytree(Path(folder, "checkpoints"), Path(folder, "first"))
    last = run(5, resume=True)
    # One process is told to stop; both must, after the same step.
    stopped = run(5, interrupt_at=1, where="stopped")
    again = run(5, resume=True, where="stopped")
    error = ""
    try:
        train.make_mesh({"tensor": 4})
    except ValueError as caught:
        error = str(caught)
    return {
        "several": several,
        "devices": [jax.local_device_count(), jax.device_count()],
        "local_rows": sorted(
            shard.data.shape[0]
            for shard in train.to_global(next(_Rows(batches, index, count)), mesh)[
                "tokens"
            ].addressable_shards
        ),
        "losses": [row["loss"] for row in last.history],
        "stopped": [stopped.stopped, stopped.signal_number, int(stopped.state.step)],
        "again": [row["loss"] for row in again.history],
        "error": error,
    }


def killed(folder: str) -> dict:
    """Trains 24 steps with frequent checkpoints and says where it is; goes on where an earlier run was killed."""
    import jax
    import numpy as np

    from effml import data, train

    class Announced(train.Checkpoints):
        def save(self, state, data_state=None):
            print("saving", int(state.step), flush=True)
            super().save(state, data_state)

    key, initial, loss, optimizer, _ = _parts()
    tokens = np.random.default_rng(0).integers(0, 64, 2000).astype(np.int32)
    step = train.make_step(loss, optimizer, clip_norm=1.0)
    eval_step = train.make_eval_step(loss)
    held_out = data.evaluation_batches(tokens[:200], batch_size=4, length=8)
    result = train.fit(
        step,
        train.init_state(key, initial, optimizer),
        data.batches(tokens, batch_size=4, length=8, seed=1),
        steps=24,
        evaluate=lambda params: train.evaluate(eval_step, params, held_out),
        evaluate_every=8,
        checkpoints=Announced(Path(folder, "checkpoints"), keep=2),
        checkpoint_every=4,
        resume=True,
        log_every=3,
        writers=[train.JsonLinesWriter(Path(folder, "metrics.jsonl"))],
        on_progress=lambda update: print("step", update.step, flush=True),
    )
    leaves = jax.tree.leaves((result.state.params, result.state.optimizer_state))
    np.savez(Path(folder, "final.npz"), *[np.asarray(a) for a in leaves])
    return {"stopped": result.stopped, "first": result.history[0]["step"]}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps({"devices": devices, "process": process, "killed": killed}[name](*arguments)))
