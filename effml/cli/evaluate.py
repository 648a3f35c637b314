"""Measure a model on text: loss, perplexity, bytes, tokens per second."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Command:
    """Options of `effml evaluate`."""

    model: Annotated[str, tyro.conf.Positional]
    """A folder written by effml, a Hugging Face folder, a .gguf file, or a name such as smollm2."""
    data: str = "stdlib"
    """Text to score: a folder, a file, or stdlib."""
    split: str = "held_out"
    """Which side of the text: held_out (what effml train does not learn from) or train."""
    length: int | None = None
    """Tokens in one window. Left out: the length that effml train used, or 512 for models from elsewhere."""
    batch_size: int = 8
    """Windows at a time."""
    max_tokens: int | None = 65_536
    """Tokens to score; none for all of them."""
    attention_mode: str | None = None
    """full or sparse (each token reads a few blocks of keys); left out: the model's own. For dense and ssa models."""
    num_blocks: int | None = None
    """With --attention-mode sparse: blocks that each token reads. Left out: the model's own, else 16."""
    block_size: int | None = None
    """With --attention-mode sparse: keys of a block. Left out: the model's own, else 16."""
    out: Path | None = None
    """Folder for result.json (default: runs/evaluate/MODEL)."""

    def run(self) -> int:
        """Scores the model, prints a table and writes result.json."""
        import time

        from effml import data, models, report
        from effml.pipeline import evaluate_model
        from effml.pipeline.evaluation import attention_options, window_length

        started = time.perf_counter()
        corpus = data.load_corpus(self.data)
        loaded = models.load(self.model)
        options = attention_options(loaded, self.attention_mode, self.num_blocks, self.block_size)
        length = window_length(loaded) if self.length is None else self.length
        measured = evaluate_model(
            loaded,
            corpus,
            split=self.split,
            length=length,
            batch_size=self.batch_size,
            max_tokens=self.max_tokens,
            options=options,
        )
        row = dataclasses.asdict(measured)
        if options:
            chosen = options["attention"].keywords["config"]
            row["attention"] = self.attention_mode
            if self.attention_mode == "sparse":
                row["keys_read"] = min(chosen.num_blocks * chosen.block_size, length)
        result = report.Result(
            method="evaluate",
            preset="cpu",
            seeds=(),
            rows=[row],
            seconds=time.perf_counter() - started,
            command=self._command(),
        )
        title = f"{loaded.name} on the {self.split} text of {self.data}, windows of up to {length:,} tokens"
        report.print_result(result, title=title)
        folder = self.out or Path("runs/evaluate") / Path(self.model).name
        print(f"result: {result.save(folder / 'result.json')}")
        return 0

    def _command(self) -> str:
        """The command line that makes the numbers again: the model, the data and every option that was changed."""
        options = ["--data", self.data]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("model", "data", "out") and value != field.default:
                options += [f"--{field.name.replace('_', '-')}", str(value)]
        return shlex.join(["effml", "evaluate", self.model, *options])
