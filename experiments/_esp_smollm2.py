"""ESP on SmolLM2-135M: what masks propose, how many tokens a pass writes, and what a pass of many rows costs.

    python -m experiments._esp_smollm2                      fills in what is missing, each job in its own process
    python -m experiments._esp_smollm2 probe "Moby Dick"    one job
    python -m experiments._esp_smollm2 write                writes the rows that are done to experiments/results

The package holds SmolLM2-135M-Instruct with weights of 4 bits; what runs is that model, dequantised. Prefixes of 64
tokens, the first half their prompt, come from Moby Dick (see `.ci/fetch_texts.sh`) and from the standard library's
source. A mask is judged by the model's own second greedy token. Prompts are questions in the chat template, beginnings
of functions and of paragraphs; each is decoded alone, plainly and with the drafter in turns.

Finished jobs are kept below `~/.cache/effml/esp-smollm2`, so a table that was stopped goes on where it was.
"""

from __future__ import annotations

import functools
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

from effml import decode, models
from effml.decode import _loop, esp
from effml.nn import transformer
from experiments._esp_models import INITS, TITLES, difference

PREFIX, PREFIXES, AT, BATCH = 64, 160, (1, 4, 14, 29), 20
NEW, PROMPT, COUNT = 64, 48, 7
TEXTS = ("Moby Dick", "Python's standard library")
ROWS = (1, 4, 6, 10, 30, 60)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain to a child why the sky is blue.",
    "Give me three tips for learning a language.",
    "What is the difference between a list and a tuple in Python?",
    "Summarize the plot of Romeo and Juliet in a few sentences.",
    "How do I make a cup of tea?",
)
# Name, and options of the drafter. Widths of 1 and 2 read four and six rows a pass.
DECODERS: dict[str, dict[str, Any]] = {
    **{f"[14] {kind}": {"widths": (14,), "mask_init": kind} for kind in ("mean", "vocab_mean", "zero")},
    "[14] last_k": {"widths": (14,), "mask_init": "last_k"},
    "[1] vocab_mean": {"widths": (1,), "mask_init": "vocab_mean"},
    "[2] vocab_mean": {"widths": (2,), "mask_init": "vocab_mean"},
    "[4] vocab_mean": {"widths": (4,), "mask_init": "vocab_mean"},
    "[15, 4] vocab_mean": {"num_masks": 2, "widths": (15, 4), "mask_init": "vocab_mean"},
    "dynamic, 30 rows, vocab_mean": {
        "num_masks": 2,
        "widths": None,
        "block_complexity": 30,
        "mask_init": "vocab_mean",
    },
    "prompt lookup, 3 tokens": {"drafter": esp.PromptLookup(3)},
    "prompt lookup, 10 tokens": {"drafter": esp.PromptLookup(10)},
    "n-gram cache [4, 1]": {"drafter": esp.NgramCache((4, 1))},
    "lookahead": {"drafter": esp.Lookahead(columns=5, ngram=3, branches=5)},
}
JOBS: tuple[tuple[str, str], ...] = (
    *(("probe", text) for text in TEXTS),
    ("cost", "rows"),
    *(("decode", name) for name in DECODERS),
    ("alignment", TEXTS[0]),
)


def folder() -> Path:
    """Where finished jobs are kept."""
    cache = Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml")
    return cache / "esp-smollm2" / f"{PREFIXES}x{PREFIX}-{COUNT}x{NEW}"


@functools.lru_cache(maxsize=2)
def read_text(name: str) -> str:
    """A text to take prefixes from, and behind its first half to count."""
    if name == TEXTS[0]:
        path = Path(os.environ.get("EFFML_MOBY_DICK") or Path.home() / ".cache/effml/moby-dick/data.txt")
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: .ci/fetch_texts.sh fetches it")
        return path.read_text(encoding="utf-8")[200_000:800_000]
    from effml import data

    corpus = data.load_corpus("stdlib", max_bytes=2_000_000)
    return "\n".join(text for _, text in corpus.text("held_out"))[:600_000]


def run_job(kind: str, name: str) -> dict[str, Any]:
    """Measures one job and keeps the outcome."""
    path = _kept(kind, name)
    if path.is_file():
        return json.loads(path.read_text())
    began = time.perf_counter()
    outcome = {"probe": _probe, "cost": _cost, "decode": _decode, "alignment": _alignment}[kind](name)
    outcome = {"kind": kind, "name": name, **outcome, "seconds": time.perf_counter() - began}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".json.partial")
    temporary.write_text(json.dumps(outcome, indent=1))
    temporary.replace(path)
    return outcome


def _kept(kind: str, name: str) -> Path:
    return folder() / f"{kind}-{''.join(c if c.isalnum() else '_' for c in name)}.json"


def _load() -> Any:
    return models.load("smollm2")


def _prefixes(tokenizer: Any, name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[count, PREFIX] from the first half of a text, and the ids of the other half."""
    text = read_text(name)
    ids = np.asarray(tokenizer.encode(text[: len(text) // 2])).astype(np.int32)
    starts = np.linspace(0, len(ids) - PREFIX - 1, count).astype(int)
    others = np.asarray(tokenizer.encode(text[len(text) // 2 :])).astype(np.int32)
    return ids[starts[:, None] + np.arange(PREFIX)], others


def _probe(name: str) -> dict[str, Any]:
    loaded = _load()
    params = jax.tree.map(jnp.asarray, transformer.stack_layers(loaded.params))
    model = _loop.freeze(loaded.forward, loaded.config, None, None, None)
    prefixes, others = _prefixes(loaded.tokenizer, name, PREFIXES)
    kinds = [
        ("mean, moving", esp.ESPConfig(mask_init="mean")),
        *((k, esp.ESPConfig(mask_init=k, ema=0.0)) for k in INITS),
    ]

    @jax.jit
    def probed(params: Any, batch: jax.Array, key: jax.Array) -> Any:
        masks = [
            esp.probe_masks(params, batch, loaded.config, config, prompt=PREFIX // 2, key=key)
            for _, config in kinds
        ]
        last, logits = esp.probe_logits(model, params, batch, jnp.concatenate(masks, axis=1))
        longer = jnp.concatenate([batch, last.argmax(-1)[:, None].astype(batch.dtype)], axis=1)
        own = model.forward(params, longer, logits_for="last").logits[:, 0].argmax(-1)
        better = logits > jnp.take_along_axis(logits, own[:, None, None], axis=2)
        return better.sum(-1), own

    ranks, targets = [], []
    for index, batch in enumerate(np.split(prefixes, PREFIXES // BATCH)):
        rank, own = probed(params, batch, jax.random.fold_in(jax.random.key(0), index))
        ranks.append(np.asarray(rank))
        targets.append(np.asarray(own))
        print(f"probe {name}: {(index + 1) * BATCH}/{PREFIXES}", flush=True)
    rank, own = np.concatenate(ranks), np.concatenate(targets)
    counts = np.bincount(others, minlength=loaded.config.vocab_size)
    by_name = {kind: rank[:, place] for place, (kind, _) in enumerate(kinds)}
    by_name["unigram"] = (counts > counts[own][:, None]).sum(1)
    return {
        "prefixes": len(prefixes),
        "hits": {kind: [float((of < k).mean()) for k in AT] for kind, of in by_name.items()},
    }


def prompts(loaded: Any) -> dict[str, list[np.ndarray]]:
    """Ids of `COUNT` prompts of each kind."""
    encode = loaded.tokenizer.encode
    chats = [
        decode.render_chat(loaded.chat_template, [{"role": "user", "content": question}])
        for question in QUESTIONS[:COUNT]
    ]
    found = {"chat": [np.asarray(encode(chat, special_tokens=True)) for chat in chats]}
    for kind, name, mark in (("code", TEXTS[1], "\ndef "), ("prose", TEXTS[0], "\n\n")):
        text = read_text(name)
        places = [place for place in range(len(text)) if text.startswith(mark, place)]
        chosen = [places[int(i)] for i in np.linspace(5, len(places) - 20, COUNT)]
        found[kind] = [np.asarray(encode(text[place : place + 800]))[:PROMPT] for place in chosen]
    return found


def _decode(name: str) -> dict[str, Any]:
    loaded = _load().for_decoding()
    options = dict(DECODERS[name])
    drafter = options.pop("drafter", None)
    extra = {"drafter": drafter} if drafter is not None else {"config": esp.ESPConfig(**options)}
    same = {"max_new_tokens": NEW, "stop_ids": loaded.tokenizer.stop_ids}
    rows: dict[str, Any] = {}
    for kind, some in prompts(loaded).items():
        calls, tokens, seconds, plainly = 0, 0, 0.0, 0.0
        accepted, different, widest = np.zeros(16), 0, 0.0
        for index, ids in enumerate(some):
            if not rows and index == 0:  # compile both
                decode.generate(loaded, ids[None], **same)
                esp.generate(loaded, ids[None], **same, **extra)
            began = time.perf_counter()
            plain = decode.generate(loaded, ids[None], **same)
            middle = time.perf_counter()
            written = esp.generate(loaded, ids[None], **same, **extra)
            plainly += middle - began
            seconds += time.perf_counter() - middle
            stats = written.stats
            calls, tokens = calls + int(stats.calls.sum()), tokens + int(stats.tokens.sum())
            accepted[: stats.accepted.shape[1]] += stats.accepted.sum(0)
            gap = difference(
                loaded, ids[None], plain.tokens, written.tokens, decode.SamplingConfig(), jax.random.key(0)
            )
            different, widest = different + int(gap["different"]), max(widest, gap["widest_gap"])
        rows[kind] = {
            "prompts": len(some),
            "calls": calls,
            "tokens": tokens,
            "accepted": (accepted / max(calls, 1)).tolist(),
            "seconds": seconds,
            "seconds_plain": plainly,
            "different": different,
            "widest_gap": widest,
        }
        print(
            f"{name}, {kind}: tau {tokens / max(calls, 1):.3f}, {plainly / seconds:.2f} x plain", flush=True
        )
    total = {key: sum(row[key] for row in rows.values()) for key in ("calls", "tokens", "seconds_plain")}
    took = sum(row["seconds"] for row in rows.values())
    return {
        "by_kind": rows,
        "tau": total["tokens"] / total["calls"],
        "calls_saved": 1 - total["calls"] / total["tokens"],
        "speed": total["seconds_plain"] / took,
        "different": sum(row["different"] for row in rows.values()),
        "widest_gap": max(row["widest_gap"] for row in rows.values()),
        "rows": 1 if drafter is not None else esp.ESPConfig(**options).rows,
    }


def _cost(name: str, repeats: int = 9, context: int = 96) -> dict[str, Any]:
    """Seconds of one pass over q rows behind a cache, all q in turns; every row's logits are computed."""
    del name
    loaded = _load().for_decoding()
    model = _loop.freeze(loaded.forward, loaded.config, None, None, None)
    cache = [
        layer._replace(length=jnp.full(1, context)) for layer in model.empty_cache(loaded.params, 1, 512)
    ]
    ids = np.random.default_rng(0).integers(100, 40_000, (1, max(ROWS))).astype(np.int32)

    @jax.jit
    def forward(params: Any, x: jax.Array, cache: Any) -> jax.Array:
        return model.forward(params, None, embeddings=x, cache=cache).logits

    inputs = {q: transformer.embed(loaded.params, ids[:, :q], loaded.config) for q in ROWS}
    seconds: dict[int, list[float]] = {q: [] for q in ROWS}
    for turn in range(repeats + 2):
        for q, x in inputs.items():
            began = time.perf_counter()
            forward(loaded.params, x, cache).block_until_ready()
            if turn >= 2:
                seconds[q].append(time.perf_counter() - began)
    return {
        "seconds": {str(q): float(np.median(one)) for q, one in seconds.items()},
        "ratio": {
            str(q): float(np.median(np.array(one) / np.array(seconds[1]))) for q, one in seconds.items()
        },
    }


def _alignment(name: str) -> dict[str, Any]:
    loaded = _load()
    stacked = jax.tree.map(jnp.asarray, transformer.stack_layers(loaded.params))
    model = type("Model", (), {"params": stacked, "config": loaded.config, "forward": loaded.forward})
    prefixes, _ = _prefixes(loaded.tokenizer, name, 40)
    found = {}
    for kind in ("mean", "vocab_mean"):
        probe = esp.alignment_probe(model, prefixes, esp.ESPConfig(mask_init=kind), prompt=PREFIX // 2)
        hit, miss = probe.means()
        found[kind] = {"hit": hit.tolist(), "miss": miss.tolist(), "hits": float(probe.hit[:, 0].mean())}
    return {"cosine": found}


def finished() -> list[dict[str, Any]]:
    """The outcomes of all jobs that are done, in their order."""
    return [json.loads(path.read_text()) for job in JOBS if (path := _kept(*job)).is_file()]


def rows(say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """All outcomes; what is missing is measured, each job in a process of its own."""
    for job in JOBS:
        if not _kept(*job).is_file():
            say(f"SmolLM2: {' '.join(job)}")
            subprocess.run([sys.executable, "-m", "experiments._esp_smollm2", *job], check=True)
    return finished()


def checks(done: list[dict[str, Any]]) -> list[tuple[str, float, str, float]]:
    """What the specification asks of the real model: name, value, comparison, bound."""
    probes = [job for job in done if job["kind"] == "probe"]
    decoded = {job["name"]: job for job in done if job["kind"] == "decode"}
    found = []
    if len(probes) == len(TEXTS):
        of = lambda kind, place: float(np.mean([job["hits"][kind][place] for job in probes]))
        found += [
            ("hit@14, moving mean less sample", of("mean, moving", 2) - of("sample", 2), ">=", 0.05),
            ("hit@29, moving mean less unigram", of("mean, moving", 3) - of("unigram", 3), ">=", 0.0),
        ]
    if best := [job["tau"] for name, job in decoded.items() if name.startswith("[14]")]:
        found.append(("tau at 30 rows, best mask", max(best), ">=", 1.15))
    if decoded:
        widest = max(job["widest_gap"] for job in decoded.values())
        found.append(("widest margin of a choice that differs from plain decoding", widest, "<=", 1e-3))
    return found


def notes(done: list[dict[str, Any]]) -> list[str]:
    """The table as remarks for the page of results."""
    lines = []
    for job in done:
        if job["kind"] == "probe":
            shown = "; ".join(
                f"{TITLES.get(kind, kind)} {' / '.join(f'{share:.2f}' for share in shares)}"
                for kind, shares in job["hits"].items()
            )
            places = "/".join(map(str, AT))
            lines.append(f"SmolLM2-135M, {job['prefixes']} prefixes of {job['name']}, hit@{places}: {shown}.")
        elif job["kind"] == "cost":
            shown = ", ".join(f"{q} rows {ratio:.2f}" for q, ratio in job["ratio"].items())
            lines.append(f"SmolLM2-135M, cost of a pass over one row's: {shown}.")
        elif job["kind"] == "alignment":
            upper = lambda layers: float(np.mean(layers[len(layers) // 2 :]))
            shown = "; ".join(
                f"{TITLES.get(kind, kind)} {upper(of['hit']):.3f} where it hits, {upper(of['miss']):.3f} where not"
                for kind, of in job["cosine"].items()
            )
            lines.append(
                f"SmolLM2-135M, {job['name']}, cosine of a mask's state to the true token's, upper half of the layers: "
                f"{shown}."
            )
    decoded = [job for job in done if job["kind"] == "decode"]
    for job in decoded:
        kinds = ", ".join(
            f"{kind} {row['tokens'] / row['calls']:.2f}" for kind, row in job["by_kind"].items()
        )
        lines.append(
            f"SmolLM2-135M, {job['name']}: {job['tau']:.3f} tokens a pass ({kinds}), {job['calls_saved']:.0%} of calls "
            f"saved, {job['speed']:.2f} x the speed of plain decoding on this CPU; {job['different']} of "
            f"{sum(row['prompts'] for row in job['by_kind'].values())} texts differ."
        )
    for name, value, op, bound in checks(done):
        holds = value >= bound if op == ">=" else value <= bound
        lines.append(
            f"SmolLM2-135M, {name}: {value:.3f} {op} {bound:g} {'holds' if holds else 'does not hold'}."
        )
    return lines


def write() -> Path:
    """Writes `smollm2.json` and `smollm2.md` to the committed results: every job that is done, and which are not."""
    from effml import report

    place = report.experiments_folder() / "results/esp"
    place.mkdir(parents=True, exist_ok=True)
    done = finished()
    missing = [" ".join(job) for job in JOBS if not _kept(*job).is_file()]
    content = {"jobs": done, "not_run": missing, "machine": report.machine()}
    (place / "smollm2.json").write_text(json.dumps(content, indent=1) + "\n")
    probes = [
        {
            "text": job["name"],
            "mask": TITLES.get(kind, kind),
            **{f"hit@{k}": share for k, share in zip(AT, shares)},
        }
        for job in done
        if job["kind"] == "probe"
        for kind, shares in job["hits"].items()
    ]
    decoded = [
        {
            "drafter": job["name"],
            "tokens per pass": job["tau"],
            **{kind: row["tokens"] / row["calls"] for kind, row in job["by_kind"].items()},
            "calls saved": job["calls_saved"],
            "speed over plain": job["speed"],
            "texts that differ": job["different"],
        }
        for job in done
        if job["kind"] == "decode"
    ]
    lines = ["# ESP on SmolLM2-135M", "", *(f"* {line}" for line in notes(done)), ""]
    lines += [report.markdown_table(part) + "\n" for part in (probes, decoded) if part]
    lines.append(f"Not run: {', '.join(missing)}." if missing else "All jobs were run.")
    cost = [job["ratio"] for job in done if job["kind"] == "cost"]
    if decoded and cost:
        figure, axes = report.figures.panels(2, size=(6.4, 4.6))
        report.bar_chart(
            {row["drafter"]: row["tokens per pass"] for row in decoded},
            xlabel="tokens per pass",
            title="What a pass writes",
            axes=axes[0],
        )
        sizes = [int(size) for size in cost[0]]
        report.line_chart(
            {"": (sizes, list(cost[0].values()))},
            xlabel="rows of a pass",
            ylabel="time over that of one row",
            title="What it costs on this CPU",
            axes=axes[1],
        )
        report.save_figure(figure, place / "smollm2.png")
        lines += ["", "![Tokens and time of a pass](smollm2.png)"]
    (place / "smollm2.md").write_text("\n".join(lines) + "\n")
    return place


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        print(write())
    elif len(sys.argv) == 3:
        run_job(*sys.argv[1:])
    else:
        rows()
