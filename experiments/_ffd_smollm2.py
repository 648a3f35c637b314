"""SmolLM2-135M read by FFD and by other selectors at the same share of blocks: a table that is filled job by job.

    python -m experiments._ffd_smollm2                     fills in what is missing, each job in its own process
    python -m experiments._ffd_smollm2 text 8192 0         one job: task, length, instance
    python -m experiments._ffd_smollm2 write               writes what is done to experiments/results

A job fills a cache densely once, keeps it on disk until the job is done, and lets every selector read the last rows:
512 of running text, or 64 that end with the answer of a retrieval task in the manner of RULER: one needle, one among
four, three values of one key, or a chain of variables, hidden in the text at depths that differ by instance. The answer
is fed as it should be; scored are its nats per token, and whether every token of it has the largest logit. Selectors
without a δ get the share of blocks that FFD with 2 bits kept in that job. Text: as in `_respinquant_smollm2.py`.

Seconds on two quiet cores, estimated: about 450 for a text job at 8,192 tokens, 75 for a task at 4,096, 170 at 8,192.
Finished selectors are kept below `~/.cache/effml/ffd-smollm2`, so that a job that was stopped goes on where it was.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml import models
from effml.attend import ffd
from effml.nn import cache as dense
from effml.nn import transformer
from experiments._ffd_rows import decoded, scored
from experiments._ffd_selectors import BY_DELTA, SelectorAttention, matched_delta
from experiments._respinquant_smollm2 import texts

BLOCK, CHUNK, OWN_ROWS = 128, 512, 64
DELTAS = (5.0, 7.0)
TASKS = ("single", "multikey", "multivalue", "tracking")
NAMES = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron"]
SCORED = {"text": 512, **dict.fromkeys(TASKS, 64)}
JOBS = (
    *(("text", 8192, index) for index in range(2)),
    *((task, 4096, index) for task in TASKS for index in range(4)),
    *((task, 8192, index) for task in TASKS for index in range(1)),
)
TITLES = {
    "dense": "dense",
    "stored": "everything, keys as FFD stores them",
    "ffd-2": "FFD, 2 bits",
    "ffd-4": "FFD, 4 bits",
    "pseudo-2": "FFD, 2 bits, probed by codes",
    "exact": "exact top-δ, as many blocks",
    "topk": "exact top-k, as many blocks",
    "quest": "Quest's bound, as many blocks",
    "mean": "mean key, as many blocks",
}


def folder() -> Path:
    """Where finished jobs are kept."""
    cache = Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml")
    return cache / "ffd-smollm2" / f"{BLOCK}"


def plans() -> list[tuple[str, str, int, float]]:
    """Key, selector, bits and δ of every row of a job; those that need FFD's share come behind it."""
    rows = [("dense", "dense", 2, 0.0), ("stored", "stored", 2, 0.0)]
    for delta in DELTAS:
        rows += [
            (f"{kind}-{bits}", kind, bits, delta) for kind, bits in (("ffd", 2), ("ffd", 4), ("pseudo", 2))
        ]
        rows += [(kind, kind, 2, delta) for kind in ("exact", "topk", "quest", "mean")]
    return rows


def build(task: str, length: int, index: int, tokenizer: Any) -> tuple[np.ndarray, int]:
    """int32[length + 1] tokens of a job, and how many at the end are scored."""
    encode = lambda text: np.asarray(tokenizer.encode(text, special_tokens=True), np.int32)
    whole = encode(texts()[2])
    if task == "text":
        start = index * length
        if len(whole) < start + length + 1:
            raise ValueError(f"the text has {len(whole)} tokens, too few for window {index} of {length}")
        return whole[start : start + length + 1], SCORED["text"]
    rng = np.random.default_rng(1000 * index + TASKS.index(task))
    number = lambda: "".join(map(str, rng.integers(0, 10, 6)))
    names = [str(name) for name in rng.permutation(NAMES)]
    told = (
        "A special magic number is hidden in the following text. Remember it. I will ask for it afterwards.\n"
    )
    say = lambda name, value: f"\nOne of the special magic numbers for {name} is: {value}.\n"
    ask = "\nWhat are all the special magic numbers for {0} in the text?<|im_end|>\n<|im_start|>assistant\n"
    ask += "The special magic numbers for {0} in the text are:"
    if task in ("single", "multikey"):
        values = [number() for _ in range(1 if task == "single" else 4)]
        needles = [say(name, value) for name, value in zip(names, values)]
        question, answer = ask.format(names[0]), f" {values[0]}"
    elif task == "multivalue":
        values = [number() for _ in range(3)]
        needles = [say(names[0], value) for value in values]
        question, answer = ask.format(names[0]), " " + ", ".join(values)
    else:
        value, chain = number(), [f"X{letter}" for letter in rng.permutation(list("ABCDEFGH"))[:4]]
        needles = [f"\nVAR {chain[0]} = {value}.\n"]
        needles += [f"\nVAR {new} = VAR {old}.\n" for old, new in itertools.pairwise(chain)]
        told = "Memorize the chains of variable assignments that are hidden in the following text.\n"
        question = (
            f"\nFind all variables that are assigned the value {value}.<|im_end|>\n<|im_start|>assistant\n"
        )
        question += f"The variables that are assigned the value {value} are:"
        answer = " " + ", ".join(chain)
    head, tail, target = encode(f"<|im_start|>user\n{told}"), encode(question), encode(answer)
    planted = [encode(needle) for needle in needles]
    room = length + 1 - len(head) - len(tail) - len(target) - sum(map(len, planted))
    offset = int(rng.integers(0, len(whole) - room))
    filler = whole[offset : offset + room]
    spread = (np.arange(len(planted)) + (index % 4 + 0.5) / 4) / len(planted)
    if task == "multikey":
        rng.shuffle(spread)
    cuts = (spread * room).astype(int)
    order = np.argsort(cuts)
    pieces, last = [head], 0
    for one in order:
        pieces += [filler[last : cuts[one]], planted[one]]
        last = cuts[one]
    return np.concatenate([*pieces, filler[last:], tail, target]), len(target)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _feed(params: Any, cache: Any, tokens: jax.Array, config: Any) -> Any:
    return transformer.forward_cached(params, tokens, cache, config, logits_for="last")[1]


def _cache_of(path: Path, params: Any, tokens: np.ndarray, config: Any) -> dense.DenseCache:
    """The dense cache of all tokens, from disk or computed and left there."""
    if path.is_file():
        with np.load(path) as kept:
            return dense.DenseCache(*(jnp.asarray(kept[name]) for name in ("keys", "values", "length")))
    cache = dense.init_cache(config, 1, len(tokens), stacked=True)
    for start in range(0, len(tokens), CHUNK):
        cache = _feed(params, cache, jnp.asarray(tokens[None, start : start + CHUNK]), config)
    temporary = path.with_name(f".{os.getpid()}.npz")
    np.savez(temporary, keys=cache.keys, values=cache.values, length=cache.length)
    temporary.replace(path)
    return cache


def run_job(task: str, length: int, index: int) -> dict[str, Any]:
    """Fills the cache, lets every selector read it, and keeps the outcome after each."""
    path = folder() / f"{task}-{length}-{index}.json"
    outcome: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": {}}
    if outcome.get("done"):
        return outcome
    path.parent.mkdir(parents=True, exist_ok=True)
    loaded = models.load("smollm2")
    config = loaded.config
    params = jax.tree.map(jnp.asarray, transformer.stack_layers(loaded.params))
    tokens, answer = build(task, length, index, loaded.tokenizer)
    before = (length - SCORED[task]) // BLOCK * BLOCK
    rows = jnp.asarray(tokens[None, before:])
    began = time.perf_counter()
    cache = _cache_of(path.with_suffix(".npz"), params, tokens[:before], config)
    outcome.setdefault("seconds_to_fill", time.perf_counter() - began)
    blocks = np.arange(before, length) // BLOCK
    total = float(blocks.sum()) * config.num_layers * config.kv_heads
    for name, kind, bits, delta in plans():
        key = f"{name}@{delta:g}"
        if key in outcome["rows"]:
            continue
        share = (
            outcome["rows"][f"ffd-2@{delta:g}"]["keep"] if kind in ("exact", "topk", "quest", "mean") else 0.0
        )
        parameter = delta if kind in BY_DELTA else share
        if kind == "exact":
            parameter = matched_delta(np.array(outcome["margins"]), total, share)
        began = time.perf_counter()
        queries = next(size for size in (64, 32, 16, 8, 4, 2, 1) if (length - before) % size == 0)
        selector = SelectorAttention(kind, BLOCK, bits, rows=queries)
        nats, right, report = scored(params, cache, rows, jnp.float32(parameter), config, selector)
        if kind == "dense":
            outcome["margins"] = np.asarray(report.margins).sum(0).tolist()
        outcome["rows"][key] = {
            "parameter": parameter,
            "nats": float(nats[0, -answer:].mean()),
            "right": float(right[0, -answer:].mean()),
            "whole": bool(right[0, -answer:].all()),
            "keep": float(report.kept.mean()),
            "mass": float(report.mass.mean()),
            "least_head": float(report.mass.mean(1).min()),
            "least_row": float(report.least.min()),
            "seconds": time.perf_counter() - began,
        }
        print(key, {k: round(float(v), 4) for k, v in outcome["rows"][key].items()}, flush=True)
        _keep(path, outcome)
    if task == "text" and "own_path" not in outcome:
        few = rows[:, : OWN_ROWS + 1]
        settings = ffd.FFDConfig(delta=7.0, block=BLOCK)
        mine, _, kept = decoded(params, cache, few, config, settings)
        masked, _, _ = scored(
            params, cache, few, jnp.float32(7.0), config, SelectorAttention("ffd", BLOCK, rows=OWN_ROWS)
        )
        outcome["own_path"] = {"apart": float(abs(mine - masked).max()), "keep": float(kept.mean())}
    outcome["done"] = True
    _keep(path, outcome)
    path.with_suffix(".npz").unlink(missing_ok=True)
    return outcome


def _keep(path: Path, outcome: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(outcome))
    temporary.replace(path)


def bytes_ratio(keep: float, bits: int = 2, head: int = 64) -> float:
    """Bytes of a dense cache in bfloat16 over those that FFD reads: long caches, tail and probes left out."""
    return 4 * head / (head * bits / 8 + 4 * head / BLOCK + keep * 3 * head)


def finished() -> list[dict[str, Any]]:
    """Rows by task, length and selector, mean over the instances that are done."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for task, length, index in JOBS:
        path = folder() / f"{task}-{length}-{index}.json"
        outcome = json.loads(path.read_text()) if path.is_file() else {}
        if not outcome.get("done"):
            continue
        reference = outcome["rows"]["dense@0"]["nats"]
        for name, _, bits, delta in plans():
            row = outcome["rows"][f"{name}@{delta:g}"]
            found.setdefault((task, length, name, bits, delta), []).append(
                {**row, "lost": row["nats"] - reference}
            )
    table = []
    for (task, length, name, bits, delta), rows in found.items():
        mean = lambda field, rows=rows: float(np.mean([row[field] for row in rows]))
        table.append(
            {
                "task": task,
                "length": length,
                "selector": TITLES[name],
                "delta": delta or None,
                "instances": len(rows),
                **{field: mean(field) for field in ("keep", "mass", "nats", "lost", "right", "whole")},
                "least_row": min(row["least_row"] for row in rows),
                "ratio": bytes_ratio(mean("keep"), bits) if name.split("-")[0] in ("ffd", "pseudo") else None,
            }
        )
    return table


def rows(say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """The whole table; what is missing is computed, each job in a process of its own so that memory is its own."""
    for job in JOBS:
        path = folder() / "{}-{}-{}.json".format(*job)
        if not (path.is_file() and json.loads(path.read_text()).get("done")):
            say(f"SmolLM2: {' '.join(map(str, job))}")
            command = [sys.executable, "-m", "experiments._ffd_smollm2", *map(str, job)]
            subprocess.run(command, check=True)
    return finished()


def notes(table: list[dict[str, Any]]) -> list[str]:
    """The table as remarks for the page of results."""
    lines = []
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in table):
        for delta in DELTAS:
            mine = [
                row for row in table if (row["task"], row["length"], row["delta"]) == (task, length, delta)
            ]
            shown = "; ".join(
                f"{row['selector']} {row['lost']:+.3f}" + (f" ({row['whole']:.0%})" if task != "text" else "")
                for row in mine
            )
            lines.append(
                f"SmolLM2-135M, {task}, {length:,} tokens, δ = {delta:g}, {mine[0]['keep']:.0%} of the blocks, nats "
                f"per token lost{' (answers whole)' if task != 'text' else ''}: {shown}."
            )
    return lines


COLUMNS = {
    "task": "task",
    "length": "tokens",
    "delta": "δ",
    "selector": "blocks chosen by",
    "instances": "instances",
    "keep": "blocks kept",
    "mass": "softmax kept",
    "least_row": "least row",
    "nats": "nats per token",
    "lost": "lost",
    "right": "tokens right",
    "whole": "answers whole",
    "ratio": "dense bytes / read",
}


def write() -> Path:
    """Writes `smollm2.json` and `smollm2.md` to the committed results: every job that is done, and which are not."""
    from effml import report

    place = report.experiments_folder() / "results/ffd"
    place.mkdir(parents=True, exist_ok=True)
    table, missing, apart = finished(), [], []
    for job in JOBS:
        path = folder() / "{}-{}-{}.json".format(*job)
        outcome = json.loads(path.read_text()) if path.is_file() else {}
        missing += [] if outcome.get("done") else [" ".join(map(str, job))]
        apart += [outcome["own_path"]["apart"]] if "own_path" in outcome else []
    content = {"rows": table, "not_run": missing, "own_path_apart": apart, "machine": report.machine()}
    (place / "smollm2.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        "# FFD on SmolLM2-135M",
        "",
        f"Blocks of {BLOCK} rows; {texts()[0]}. For text nats and tokens are those of the last {SCORED['text']} rows, "
        "for the other tasks those of the answer.",
        "",
        report.markdown_table(table, COLUMNS),
        "",
        f"Not run: {', '.join(missing)}." if missing else "All jobs were run.",
    ]
    if apart:
        lines += [
            "",
            f"Largest distance of one token's nats to FFD's own cache and kernel: {max(apart):.1e}.",
        ]
    if any(row["task"] == "text" for row in table):
        report.save_figure(_figure(table), place / "smollm2.png")
        lines += ["", "![What leaving out costs](smollm2.png)"]
    (place / "smollm2.md").write_text("\n".join(lines) + "\n")
    return place


def _figure(table: list[dict[str, Any]]) -> Any:
    """What is lost on text, and found in the other tasks, by selector and share of blocks."""
    from effml import report

    figure, axes = report.figures.panels(2, size=(7.2, 5.2))
    chosen = [row for row in table if row["delta"] is not None]
    panels = (
        ("text", "lost", "lost (nats per token)", "Text of 8,192 tokens", (None, 0.19)),
        ("retrieval", "right", "share of the answer's tokens", "Retrieval, mean of the tasks", (0.1, None)),
    )
    for panel, (task, field, label, title, ylim) in zip(axes, panels):
        series = {}
        for name in dict.fromkeys(row["selector"] for row in chosen):
            places = []
            for delta in DELTAS:
                rows = [
                    row
                    for row in chosen
                    if row["selector"] == name
                    and row["delta"] == delta
                    and (row["task"] == "text") == (task == "text")
                ]
                if rows:
                    places.append([float(np.mean([row[of] for row in rows])) for of in ("keep", field)])
            if places:
                series[name.removesuffix(", as many blocks")] = tuple(np.array(places).T)
        if series:
            report.line_chart(
                series, xlabel="share of blocks kept", ylabel=label, title=title, ylim=ylim, axes=panel
            )
    return figure


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        print(write())
    elif len(sys.argv) == 4:
        run_job(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        rows()
