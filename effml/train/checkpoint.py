"""Checkpoints from which a killed run goes on bit for bit.

A checkpoint holds the training state (step, parameters, optimizer, PRNG key), the position of every process
in its data, and a description: what the caller says about the run, the shape and type of every array, and a
32-bit fingerprint of its bits. Orbax writes it to a temporary name and renames it when it is whole, so a
crash leaves either the old checkpoints or one more. On the way back the description is compared first, which
turns "another model" into a sentence, and the fingerprints last, which finds damage that the file format does
not.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from effml._validate import count
from effml.train._state import TrainState
from effml.train.sharding import sync_processes

__all__ = ["Checkpoints"]

_FORMAT = 1
_ABOUT = {"format": int, "metadata": dict, "arrays": dict, "fingerprints": dict, "data": list}


class Checkpoints:
    """A folder of checkpoints, the newest `keep` of them.

    Args:
        folder: where they are; made at the first save.
        keep: how many to keep.
        metadata: what identifies the run, in JSON types: the model's configuration, the optimizer's name. A
            checkpoint is only restored where this is the same.

    Raises:
        ValueError: if `keep` is not positive or `folder` is a file.
        TypeError: if the metadata is not made of JSON types.

    Example:
        >>> import optax, tempfile
        >>> from effml.train import init_state
        >>> state = init_state(jax.random.key(0), {"w": jnp.ones(3)}, optax.sgd(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(folder, metadata={"optimizer": "sgd"})
        ...     checkpoints.save(state, {"next_index": 7})
        ...     restored, data_state = checkpoints.restore(state)
        ...     checkpoints.latest_step(), data_state, restored.params["w"].tolist()
        (0, {'next_index': 7}, [1.0, 1.0, 1.0])
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep: int = 3, metadata: Mapping[str, Any] | None = None
    ):
        self.folder = Path(folder).absolute()
        self.keep = count("keep", keep)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"the checkpoint folder {self.folder} is a file")
        try:
            self.metadata: dict[str, Any] = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"metadata must be made of JSON types: {error}") from error
        self._manager: Any = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads behind the folder; a later call starts them again."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, ascending; half-written ones are not among them."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir())

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def _open(self) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp

            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for leftover in self.folder.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep, create=False, enable_async_checkpointing=False
            )
            sync_processes("effml_checkpoint_folder")
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "about"))
        return self._manager

    def save(self, state: TrainState, data_state: Any = None) -> None:
        """Writes the checkpoint of step `state.step`; returns when it is safe on disk.

        With several processes all of them call this, each with the position in its own data.

        Args:
            state: the training state.
            data_state: what the batch iterator's `get_state()` gave: JSON types or bytes, or None.

        Raises:
            ValueError: if the folder holds newer checkpoints, or those of another run.
            TypeError: if `data_state` is neither made of JSON types nor bytes.
        """
        import orbax.checkpoint as ocp

        step = int(state.step)
        latest = self.latest_step()
        if latest is not None and latest > step:
            raise ValueError(
                f"{self.folder} holds checkpoints up to step {latest}, past step {step}; "
                "resume from there, or choose another folder"
            )
        if latest is not None:
            # The first save into a folder that was used before must be by the same run.
            if self._manager is None:
                self._compare(self._read_about(latest), latest)
            if latest == step:
                return
        about = {
            "format": _FORMAT,
            "metadata": self.metadata,
            "arrays": _describe(state),
            "fingerprints": _fingerprints(state),
            "data": _gather(_encode_data(data_state)),
        }
        manager = self._open()
        try:
            manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)),
                force=True,
            )
        except Exception as error:  # what Orbax raises for a full disk depends on where the disk became full
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder} ({reason}); is the disk "
                f"full, or another run in this folder? Whole checkpoints there: {self.steps() or 'none'}"
            ) from error

    def restore(
        self, example: TrainState, *, step: int | None = None, require_data: bool = True
    ) -> tuple[TrainState, Any]:
        """Reads a checkpoint back, bit for bit.

        Args:
            example: a state of the same structure, arrays or `jax.ShapeDtypeStruct`; each array comes back
                with the sharding of its example, so another mesh or number of devices than at the save is
                fine.
            step: which one; None is the newest.
            require_data: the position in the data belongs to a process; where the number of processes has
                changed it can't be given back. True makes that an error, False returns None for it.

        Returns:
            The state, and this process's position in the data.

        Raises:
            ValueError: if there is no such checkpoint, it is damaged, it belongs to another run or model, or
                (with `require_data`) it was written by another number of processes.
        """
        import orbax.checkpoint as ocp

        steps = self.steps()
        if not steps:
            raise ValueError(f"there is no checkpoint in {self.folder}")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ValueError(f"there is no checkpoint of step {step} in {self.folder}, only of {steps}")
        about = self._read_about(step)
        self._compare(about, step)
        self._compare_arrays(about["arrays"], _describe(example), step)
        data = about["data"]
        if len(data) == jax.process_count():
            try:
                data_state = _decode_data(data[jax.process_index()])
            except (ValueError, TypeError, KeyError) as error:
                raise self._damaged(step, "its position in the data can't be read") from error
        elif require_data:
            raise ValueError(
                f"checkpoint {self._path(step)} was written by {len(data)} processes and this job has "
                f"{jax.process_count()}, so positions in the data don't carry over; use as many processes, "
                "or require_data=False to start the data afresh"
            )
        else:
            data_state = None
        target = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None)), example
        )
        try:
            state = self._open().restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
            )
            state = state["state"]
        except Exception as error:
            raise self._damaged(step, f"{type(error).__name__} while reading its arrays") from error
        wanted, found = about["fingerprints"], _fingerprints(state)
        for name in found:
            if found[name] != wanted.get(name):
                raise self._damaged(step, f"the values of {name} are not those that were saved")
        return state, data_state

    def _path(self, step: int) -> Path:
        return self.folder / str(step)

    def _damaged(self, step: int, reason: str) -> ValueError:
        earlier = [s for s in self.steps() if s < step]
        fix = f"go on from step {earlier[-1]}" if earlier else "start again: there is no earlier one"
        return ValueError(f"checkpoint {self._path(step)} is damaged ({reason}); delete that folder to {fix}")

    def _read_about(self, step: int) -> dict[str, Any]:
        try:
            about = json.loads((self._path(step) / "about" / "metadata").read_text(encoding="utf-8"))
            missing = set(_ABOUT) - set(about)
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(step, "its description can't be read") from error
        if missing:
            raise self._damaged(step, f"its description lacks {', '.join(sorted(missing))}")
        if about["format"] != _FORMAT:
            raise ValueError(
                f"checkpoint {self._path(step)} has format {about['format']}; "
                f"this version of effml reads {_FORMAT}"
            )
        wrong = [name for name, kind in _ABOUT.items() if not isinstance(about[name], kind)]
        if not wrong and not all(isinstance(a, list) and len(a) == 2 for a in about["arrays"].values()):
            wrong = ["arrays"]
        if wrong:
            raise self._damaged(step, f"its description has a wrong type for {', '.join(wrong)}")
        return about

    def _compare(self, about: dict[str, Any], step: int) -> None:
        differences = _differences(about["metadata"], self.metadata)
        if differences:
            raise ValueError(f"checkpoint {self._path(step)} is of another run: {'; '.join(differences[:5])}")

    def _compare_arrays(self, saved: dict[str, Any], wanted: dict[str, Any], step: int) -> None:
        differences = [
            f"{name} is {_words(saved.get(name))} there and {_words(wanted.get(name))} here"
            for name in [*saved, *(n for n in wanted if n not in saved)]
            if saved.get(name) != wanted.get(name)
        ]
        if differences:
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise ValueError(
                f"checkpoint {self._path(step)} is of another model: {'; '.join(differences[:3])}{more}"
            )


def _words(array: list[Any] | None) -> str:
    return "absent" if array is None else f"{array[1]}{array[0]}"


def _differences(saved: Any, here: Any, name: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(here, dict):
        keys = [*saved, *(key for key in here if key not in saved)]
        lines = []
        for key in keys:
            path = f"{name}.{key}" if name else key
            if key not in saved or key not in here:
                where, value = ("the checkpoint", saved[key]) if key in saved else ("this run", here[key])
                lines.append(f"only {where} has {path}={value!r}")
            else:
                lines += _differences(saved[key], here[key], path)
        return lines
    return [] if saved == here else [f"{name} is {saved!r} there and {here!r} here"]


def _names(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _describe(state: PyTree) -> dict[str, list[Any]]:
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in _names(state)}


def _bits(array: Array) -> Array:
    """The bits of an array as 32-bit words, uint32."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype in (jnp.bool_, jnp.int4, jnp.uint4):
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    if size == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
    return jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)


@jax.jit
def _fingerprint_leaves(leaves: list[Array]) -> list[UInt32[Array, ""]]:
    # Σ (2i + 1) · bitsᵢ modulo 2³²: odd factors are invertible, so one changed word always shows; and a sum
    # does not depend on how the array is split over devices.
    def one(array):
        words = _bits(array)
        index, stride = jnp.zeros(words.shape, jnp.uint32), 1
        for axis in reversed(range(words.ndim)):
            index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= words.shape[axis]
        return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]


def _fingerprints(state: PyTree) -> dict[str, int]:
    named = [(name, leaf) for name, leaf in _names(state) if leaf.size]
    values = jax.device_get(_fingerprint_leaves([jnp.asarray(leaf) for _, leaf in named]))
    return {name: int(value) for (name, _), value in zip(named, values)}


def _encode_data(data_state: Any) -> str:
    if isinstance(data_state, bytes):
        return json.dumps({"bytes": base64.b64encode(data_state).decode()})
    try:
        return json.dumps({"json": data_state}, default=_plain_number)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the data iterator's state must be JSON types or bytes: {error}") from error


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _decode_data(text: str) -> Any:
    data = json.loads(text)
    return base64.b64decode(data["bytes"]) if "bytes" in data else data["json"]


def _gather(text: str) -> list[str]:
    """The texts of all processes, in process order."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    raw = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(raw.size))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: raw.size] = raw
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes)]
