"""One model that was trained to be read sparsely, and what each way of reading it costs: bytes, passes, and loss."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from effml.pipeline.runner import PipelineRun
from effml.pipeline.training import TrainedModel, train_model
from effml.report import Metric

if TYPE_CHECKING:
    from jaxtyping import Array
    from matplotlib.figure import Figure

    from effml.models import LoadedModel
    from effml.report import Page

__all__ = ["Reading", "ReadingResult", "SSATrainingResult", "Writing", "serve_ssa", "train_ssa"]

# What differs from the other models' training: sequences of twice the length, so that there is something to leave
# out, and fewer of them, because both attentions are computed.
_TRAINING: dict[str, dict[str, Any]] = {
    "cpu": {"steps": 160, "length": 256, "batch_size": 4, "block_size": 16, "num_blocks": 4},
    "smoke": {"steps": 2, "length": 32, "batch_size": 4, "block_size": 8, "num_blocks": 2},
}
_WINDOWS = {"cpu": 16, "smoke": 2}
_PROMPTS = {"cpu": 4, "smoke": 1}
# The paper's, and one that leaves something out of heads as even as those of a model so young.
_DELTAS = (5.0, 2.0)
# Few candidates: of a vocabulary of 256 bytes, wide trees would catch the next one whoever proposes.
_WIDTHS = (4,)


@dataclass(frozen=True)
class SSATrainingResult:
    """A model trained for full and for block-sparse attention at once, with the best optimizer."""

    trained: TrainedModel

    def add_to(self, page: Page) -> None:
        """Says how it was trained."""
        config, attention = self.trained.config, self.trained.model.to_dict()["attention"]
        seen = attention["block_size"] * attention["num_blocks"]
        page.add_heading("A model for sparse attention")
        page.add_text(
            f"The same sizes, trained by {config.optimizer} for {config.steps:,} batches of {config.batch_size} x "
            f"{config.length} tokens with both full attention and attention to {attention['num_blocks']} blocks of "
            f"{attention['block_size']} keys ({seen} of {config.length}), whose outputs are pulled together (SSA). "
            f"Held-out loss {self.trained.held_out['nats_per_token']:.3f} nats per token with full attention, "
            f"{self.trained.held_out['sparse_nats_per_token']:.3f} with sparse attention. It has had less training "
            "than the models above, and is there for what is below."
        )

    def metrics(self) -> list[Metric]:
        """Nothing: what it is for is measured when it is read."""
        return []

    def summary(self) -> dict[str, float | int]:
        """Held-out loss by mode."""
        return {
            "ssa_full_held_out": self.trained.held_out["nats_per_token"],
            "ssa_sparse_held_out": self.trained.held_out["sparse_nats_per_token"],
            "ssa_tokens_per_second": self.trained.tokens_per_second,
        }


def train_ssa(run: PipelineRun) -> SSATrainingResult:
    """Training one more model, for full and for sparse attention."""
    from effml.pipeline.stages import EvaluationResult, TextResult

    best = run.result(EvaluationResult).best
    config = dataclasses.replace(run.config.training(best), attention="ssa", **_TRAINING[run.config.preset])
    if run.config.steps is not None:
        config = dataclasses.replace(config, steps=min(run.config.steps, config.steps))
    trained = train_model(config, run.config.out / "ssa", corpus=run.result(TextResult).corpus)
    if trained.signal_number is not None:
        raise KeyboardInterrupt
    with (run.config.out / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        for row in trained.history:
            metrics.write(json.dumps({"optimizer": "ssa", **row}) + "\n")
    return SSATrainingResult(trained)


class Reading(NamedTuple):
    """Held-out text, read token by token through one kind of cache.

    Attributes:
        nats_per_token: its loss.
        agreement: share of places at which the likeliest next token is that of full attention.
        bytes_per_token: keys and values (and what chooses them) that are read of all layers' caches.
        kept: share of the cache's blocks whose keys and values are read.
    """

    nats_per_token: float
    agreement: float
    bytes_per_token: float
    kept: float


class Writing(NamedTuple):
    """Greedy text after held-out prompts.

    Attributes:
        tokens_per_second: of one sequence, compilation left out.
        same: share of the written tokens that are those of full attention, up to each text's first difference.
        tokens_per_pass: tokens that a pass of the model gives.
    """

    tokens_per_second: float
    same: float
    tokens_per_pass: float

    @property
    def calls_saved(self) -> float:
        """Share of plain decoding's passes that were not needed."""
        return 1 - 1 / self.tokens_per_pass


@dataclass(frozen=True)
class ReadingResult:
    """One model, read and let write in every way.

    Attributes:
        length: tokens of a window.
        readings: by the cache's name; full attention is `"dense"`.
        writings: by the name of cache and decoder; those of `readings` are decoded token by token.
    """

    length: int
    readings: dict[str, Reading]
    writings: dict[str, Writing]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each way of reading or writing."""
        rows = []
        for name in dict.fromkeys((*self.readings, *self.writings)):
            row: dict[str, Any] = {"decoding": name}
            if name in self.readings:
                read = self.readings[name]
                row |= {
                    "loss (nats/token)": read.nats_per_token,
                    "lost (nats/token)": read.nats_per_token - self.readings["dense"].nats_per_token,
                    "greedy token as dense": f"{read.agreement:.1%}",
                    "blocks kept": f"{read.kept:.0%}",
                    "cache read (kB/token)": read.bytes_per_token / 1e3,
                }
            if name in self.writings:
                written = self.writings[name]
                row |= {
                    "written as dense": f"{written.same:.0%}",
                    "tokens a pass": written.tokens_per_pass,
                    "calls saved": f"{written.calls_saved:.0%}",
                    "writing (tokens/s)": round(written.tokens_per_second),
                }
            rows.append(row)
        return rows

    def figure(self) -> Figure:
        """What a reading costs against what it reads, and passes for each token."""
        from effml.report import figures

        figure, (left, right) = figures.panels(2)
        figures.scatter_chart(
            {name: (read.bytes_per_token / 1e3, read.nats_per_token) for name, read in self.readings.items()},
            xlabel="cache read (kB per token)",
            ylabel="held-out loss (nats per token)",
            axes=left,
        )
        figures.bar_chart(
            {name: 1 / written.tokens_per_pass for name, written in self.writings.items()},
            xlabel="passes of the model per token",
            axes=right,
        )
        return figure

    def add_to(self, page: Page) -> None:
        """Adds the table and the plot."""
        page.add_heading("Fewer bytes and fewer passes for each token")
        page.add_text(
            f"The model of the section above reads held-out windows of {self.length} tokens one token at a time: every "
            "key (dense), the blocks that its training taught it to choose (ssa), or 2-bit codes of all keys and the "
            f"rest of the blocks whose largest score comes within {_DELTAS[0]:g} nats of the largest (ffd; delta "
            f"{_DELTAS[1]:g} reads fewer). Bytes are those of keys, values and what chooses them, averaged over the "
            "window. esp adds one soft mask behind each "
            f"token, which proposes {_WIDTHS[0]} candidates for the token after it, and the next pass verifies them. "
            "Written texts start from held-out prompts; speeds are of one sequence on this machine, where so short a "
            "cache and so small a model are not what a pass spends its time on."
        )
        page.add_table(self.rows(), best={"cache read (kB/token)": "min", "tokens a pass": "max"})
        page.add_figure(
            self.figure(),
            alt="held-out loss against bytes of cache read for each token, and passes of the model per token",
            caption="Left: lower left is better. Right: shorter is better.",
        )

    def metrics(self) -> list[Metric]:
        """Bytes that ssa and ffd read, and passes that esp saves."""
        dense = self.readings["dense"]
        found = [
            Metric(
                f"{read.bytes_per_token / dense.bytes_per_token:.0%}",
                f"of the cache's bytes read for a token, {name}",
                f"{read.nats_per_token - dense.nats_per_token:+.4f} nats per token",
            )
            for name, read in self.readings.items()
            if name != "dense"
        ]
        esp = self.writings["esp"]
        same = f"{esp.same:.0%} of its tokens are those of plain decoding"
        return [*found, Metric(f"{esp.calls_saved:.0%}", "of the passes saved by esp", same)]

    def summary(self) -> dict[str, float | int]:
        """Loss, bytes, agreement and speed, by way."""
        numbers: dict[str, float | int] = {}
        for name, read in self.readings.items():
            key = _key(name)
            numbers[f"read_{key}_nats_per_token"] = read.nats_per_token
            numbers[f"read_{key}_nats_lost"] = read.nats_per_token - self.readings["dense"].nats_per_token
            numbers[f"read_{key}_agreement"] = read.agreement
            numbers[f"read_{key}_kept"] = read.kept
            numbers[f"read_{key}_bytes_per_token"] = read.bytes_per_token
        for name, written in self.writings.items():
            key = _key(name)
            numbers[f"write_{key}_tokens_per_second"] = written.tokens_per_second
            numbers[f"write_{key}_same"] = written.same
            numbers[f"write_{key}_tokens_per_pass"] = written.tokens_per_pass
            numbers[f"write_{key}_calls_saved"] = written.calls_saved
        return numbers


def _key(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def serve_ssa(run: PipelineRun) -> ReadingResult:
    """Reading and writing with dense, sparse and two-bit caches, and several tokens a pass."""
    from effml import data, decode, models
    from effml.attend import ffd, ssa
    from effml.decode import esp
    from effml.pipeline.stages import TextResult

    trained = run.result(SSATrainingResult).trained
    loaded = models.load(str(trained.folder / "model"))
    attention, length = loaded.config.attention, trained.config.length
    held_out = data.encode_corpus(run.result(TextResult).corpus, "held_out", loaded.tokenizer)
    starts = np.linspace(0, len(held_out) - length - 1, _WINDOWS[run.config.preset]).astype(int)
    windows = held_out[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    sparse = ssa.decoding_options(loaded.config)
    two_bit, fewer = (ffd.decoding_options(delta=delta, block=attention.block_size) for delta in _DELTAS)

    losses, choices, _ = _read(loaded, windows, ssa.decoding_options(loaded.config, mode="full"))
    readings = {"dense": Reading(losses, 1.0, _bytes_read(loaded.config, length), 1.0)}
    for name, options in (("ssa", sparse), ("ffd", two_bit), (f"ffd, delta {_DELTAS[1]:g}", fewer)):
        loss, chosen, (read, kept) = _read(loaded, windows, options)
        if name == "ssa":
            read, kept = _bytes_read(loaded.config, length, sparse=True), _blocks_kept(attention, length)
        readings[name] = Reading(loss, float((chosen == choices).mean()), read, kept)
        print(
            f"      {name}: {loss - losses:+.4f} nats, {read / readings['dense'].bytes_per_token:.0%} of the bytes"
        )

    prompts = windows[:: max(1, len(windows) // _PROMPTS[run.config.preset]), : length // 2]
    prompts = prompts[: _PROMPTS[run.config.preset]]
    model, new = loaded.for_decoding(), length - prompts.shape[1]
    plain = functools.partial(decode.generate, model, max_new_tokens=new)
    drafted = functools.partial(esp.generate, model, max_new_tokens=new, config=esp.ESPConfig(widths=_WIDTHS))
    ways: dict[str, Callable[..., Any]] = {
        "dense": plain,
        "ssa": functools.partial(plain, **sparse),
        "ffd": functools.partial(plain, **two_bit),
        "esp": drafted,
        "ffd and esp": functools.partial(drafted, **two_bit, block_size=attention.block_size),
    }
    writings, dense = {}, None
    for name, write in ways.items():
        texts, seconds, per_pass = _write(write, prompts)
        dense = texts if dense is None else dense
        same = np.cumprod(texts == dense, axis=1).mean()
        writings[name] = Writing(texts.size / seconds, float(same), per_pass)
    return ReadingResult(length, readings, writings)


def _write(write: Callable[..., Any], prompts: np.ndarray) -> tuple[np.ndarray, float, float]:
    """What follows each prompt, the seconds that it took, and tokens per pass."""
    write(prompts[:1])  # compiles
    started = time.perf_counter()
    written = [write(prompt[None]) for prompt in prompts]
    seconds = time.perf_counter() - started
    calls = sum(int(one.stats.calls.sum()) for one in written if hasattr(one, "stats"))
    tokens = sum(int(one.stats.tokens.sum()) for one in written if hasattr(one, "stats"))
    return np.concatenate([one.tokens for one in written]), seconds, tokens / calls if calls else 1.0


def _read(
    loaded: LoadedModel, windows: np.ndarray, options: Mapping[str, Any]
) -> tuple[float, np.ndarray, tuple[float, float]]:
    """Loss, likeliest tokens [length, windows], and for FFD the bytes read for each token and the share kept."""
    losses, choices, read, kept = _reader()(loaded.params, windows, config=loaded.config, **options)
    return float(losses.mean()), np.asarray(choices), (float(read.mean()), float(kept.mean()))


@functools.lru_cache(maxsize=1)
def _reader() -> Callable[..., Any]:
    import jax

    return jax.jit(_read_through, static_argnames=("config", "attention", "cache_init", "append"))


def _read_through(
    params: Any, windows: Any, *, config: Any, attention: Any, cache_init: Any, append: Any
) -> tuple[Array, Array, Array, Array]:
    """Windows int32[batch, length + 1], all read one token at a time."""
    import jax
    import jax.numpy as jnp

    from effml.attend import ffd, ssa

    batch, length = windows.shape[0], windows.shape[1] - 1
    layers = list(params["layers"])

    def advance(caches: Any, given: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array, Array, Array]]:
        token, target = given
        out = ssa.forward(params, token[:, None], config, cache=caches, attention=attention)
        logits = out.logits[:, 0]
        loss = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[:, None], 1)[:, 0]
        read = kept = jnp.zeros(batch)
        for cache, stats in zip(caches, out.info):
            if isinstance(stats, ffd.FFDStats):
                read += ffd.bytes_read(cache, stats.kept)[0]
                kept += stats.keep_ratio / len(layers)
        caches = [append(cache, *new) for cache, *new in zip(caches, out.keys, out.values)]
        return caches, (loss, logits.argmax(-1), read, kept)

    caches = cache_init(config.model, batch, length)
    losses, choices, read, kept = jax.lax.scan(advance, caches, (windows[:, :-1].T, windows[:, 1:].T))[1]
    return losses, choices, read, kept


def _bytes_read(config: Any, length: int, *, sparse: bool = False) -> float:
    """Bytes of all layers' caches that are read for a token, averaged over the places of a window.

    Sparse attention reads the sum of keys of every block that is full, the rows of `num_blocks - 1` of them at most,
    and those of the block that is being filled.
    """
    model, attention = config.model, config.attention
    before = np.arange(length)
    wide = np.dtype(model.compute_dtype).itemsize if model.compute_dtype != "bfloat16" else 2
    of_row, of_sum = 2 * model.head_dim * wide, 4 * model.head_dim
    if not sparse:
        each = before * of_row
    else:
        full = before // attention.block_size
        rows = (
            np.minimum(full, attention.num_blocks - 1) * attention.block_size + before % attention.block_size
        )
        each = rows * of_row + full * of_sum
    return float(each.mean() * model.kv_heads * model.num_layers)


def _blocks_kept(attention: Any, length: int) -> float:
    """Share of the full blocks that sparse attention reads, averaged over the places of a window; 1 without blocks."""
    full = np.arange(length) // attention.block_size
    kept = np.minimum(full, attention.num_blocks - 1) / np.maximum(full, 1)
    return float(np.where(full > 0, kept, 1.0).mean())
