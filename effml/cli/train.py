"""Train a language model on your text with a memory-lean optimizer.

A job of several processes is the same command in each of them, with EFFML_COORDINATOR=host:port (of process 0),
EFFML_NUM_PROCESSES and EFFML_PROCESS_ID set, --mesh over all their devices, and --out in a folder they share.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from effml.pipeline.training import TrainConfig


@dataclass(frozen=True)
class Command:
    """Options of `effml train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    out: Path = Path("runs/train")
    """Folder for the model, its checkpoints and metrics.jsonl."""
    resume: bool = False
    """Go on from the last checkpoint in the folder, exactly as if the run had not been stopped; without further
    options the run's own are taken."""
    track: str = ""
    """Also send metrics to tensorboard, wandb or trackio."""

    def run(self) -> int:
        """Trains, prints the held-out loss and where the model is."""
        import jax

        from effml import train
        from effml.pipeline import train_model
        from effml.pipeline.training import read_config

        config = self.config
        if self.resume:
            config = _with_what_is_given(read_config(self.out), config)
            print(
                f"going on with {config.optimizer}, {config.steps:,} steps on {config.data}", file=sys.stderr
            )
        train.initialize_distributed()
        writes = jax.process_index() == 0
        trackers = _trackers(self.track, self.out) if writes else []
        trained = train_model(config, self.out, resume=self.resume, trackers=trackers)
        if not writes:
            return 0 if trained.signal_number is None else 128 + trained.signal_number
        if trained.signal_number is not None:
            print(f"stopped; go on with: effml train --resume --out {self.out}")
            return 128 + trained.signal_number
        found = trained.held_out.get("sparse_nats_per_token")
        sparse = "" if found is None else f"{found:.4f} with its blocks alone, "
        print(
            f"held-out loss {trained.held_out['nats_per_token']:.4f} nats per token "
            f"({trained.held_out['nats_per_byte']:.4f} per byte), {sparse}{trained.tokens_per_second:,.0f} tokens/s, "
            f"optimizer state {trained.optimizer_bytes:,} bytes for {trained.parameter_bytes:,} bytes of parameters"
        )
        print(f"model: {self.out / 'model'}   metrics: {self.out / 'metrics.jsonl'}")
        return 0


def _with_what_is_given(before: TrainConfig, given: TrainConfig) -> TrainConfig:
    """The options of the run before; those that are given now must not change it."""
    default = TrainConfig()
    changes = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(TrainConfig)
        if getattr(given, field.name) not in (getattr(default, field.name), getattr(before, field.name))
    }
    return dataclasses.replace(before, **changes)  # and train_model refuses what differs, by name


def _trackers(name: str, folder: Path) -> list[Any]:
    if not name:
        return []
    from effml import train
    from effml._validate import one_of

    writers = {
        "tensorboard": lambda: train.TensorBoardWriter(folder / "tensorboard"),
        "wandb": lambda: train.WandbWriter(project="effml", name=folder.name),
        "trackio": lambda: train.TrackioWriter(project="effml", name=folder.name),
    }
    return [writers[one_of("track", name, writers)]()]
