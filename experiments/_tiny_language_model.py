"""One small language model that was never quantised, trained once and kept: for tests, examples and experiments.

A Llama-style model of 1.1M parameters (width 128, four layers, 512 wide in between) on bytes of the Python standard
library's own source. Every real model that installs without a download is quantised already, so what 4, 3 or 1 bit
cost can only be measured on one like this.

    python -m experiments._tiny_language_model              trains it (about 4 minutes on two cores), or finds it
    effml evaluate ~/.cache/effml/tiny-language-model/...   what the last line printed

Same seed and same library sources give the same model; both, and the number of steps, are in the folder's name.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effml.models import LoadedModel
    from effml.pipeline import TrainConfig

__all__ = ["model_folder", "tiny_language_model", "training"]

STEPS = 800


def training(steps: int = STEPS, seed: int = 0) -> TrainConfig:
    """What is trained: byte tokens, batches of 16 x 128, NorMuon at its tuned rate."""
    from effml.pipeline import TrainConfig

    return TrainConfig(
        optimizer="normuon", steps=steps, mlp_width=512, evaluate_every=0, checkpoint_every=200, seed=seed
    )


def model_folder(steps: int = STEPS, seed: int = 0) -> Path:
    """Where the model is kept: below `$EFFML_CACHE`, or `~/.cache/effml`."""
    from effml import data

    cache = Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml")
    text = data.load_corpus("stdlib").fingerprint[:12]
    return cache / "tiny-language-model" / f"{text}-{steps}-{seed}"


def tiny_language_model(steps: int = STEPS, seed: int = 0) -> LoadedModel:
    """The model, read from its folder, or trained and left there.

    A training that was stopped goes on from its last checkpoint. The model appears in its folder when it is whole.
    """
    from effml import models
    from effml.pipeline import train_model

    folder = model_folder(steps, seed)
    if not (folder / "model/effml.json").is_file():
        run = folder.with_name(f"{folder.name}.partial")
        trained = train_model(training(steps, seed), run, resume=(run / "train.json").is_file())
        if trained.signal_number is not None:
            raise KeyboardInterrupt
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if not folder.exists():
            run.rename(folder)
    return models.load(str(folder / "model"))


if __name__ == "__main__":
    from effml import trees

    loaded = tiny_language_model()
    print(f"{trees.byte_count(loaded.params) / 4e6:.2f}M parameters", file=sys.stderr)
    print(loaded.source)
