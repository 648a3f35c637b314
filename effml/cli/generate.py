"""Let a model write: from a prompt, a file of prompts, or in a chat."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from effml.decode import SamplingConfig, TextStream
    from effml.decode.esp import ESPConfig, ESPStats, ESPStream
    from effml.models import LoadedModel


@dataclass(frozen=True)
class Command:
    """Options of `effml generate`."""

    model: Annotated[str, tyro.conf.Positional]
    """A folder written by effml, a Hugging Face folder, a .gguf file, or a name such as smollm2."""
    prompt: str | None = None
    """Text to go on from."""
    prompts: Path | None = None
    """A file with one prompt on each line; one JSON object per prompt is printed."""
    chat: bool = False
    """Talk with the model: `prompt` is the first message, further ones are read from the terminal. Without a
    terminal a given prompt is the only message, else each line of standard input is one."""
    max_new_tokens: int = 128
    """Tokens to write at most."""
    decoder: str = "greedy"
    """greedy (the most likely token each time), sample, or esp: several tokens per pass of the model, the same ones
    that greedy (or, with a temperature, sample) would write."""
    cache: str = "dense"
    """dense: keys and values as they are. ffd: keys in 2 bits and their rest, of which decoding reads what matters."""
    delta: float | None = None
    """With --cache ffd: blocks are read whose largest score is at most this far (nats) below the largest; None is 5."""
    cache_block: int | None = None
    """With --cache ffd: tokens of a block, a multiple of 8; None is the model's own, or 128."""
    attention_mode: str | None = None
    """full or sparse (each token reads a few blocks of keys), for a model trained with SSA; left out: full."""
    num_blocks: int | None = None
    """With --attention-mode sparse: blocks that each token reads. Left out: the model's own."""
    temperature: float | None = None
    """With --decoder sample: below 1 keeps closer to the likeliest tokens, above 1 is more varied; None is 1.
    With --decoder esp: None is greedy."""
    top_k: int | None = None
    """With --decoder sample, or esp and a temperature: choose among the k most likely tokens only."""
    top_p: float | None = None
    """Likewise: choose among the likeliest tokens that hold this probability together."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not printed."""
    seed: int = 0
    masks: int | None = None
    """With --decoder esp: soft masks behind every token, each proposing one token further ahead; None is 1, or one for
    each of --widths. Several without --widths spread their candidates anew at every pass."""
    widths: tuple[int, ...] | None = None
    """With --decoder esp: candidates for each token ahead, such as `--widths 14` or `--widths 15 4`."""
    block_complexity: int | None = None
    """With --decoder esp, instead of --widths: rows that a pass reads; candidates are spread anew at every pass."""
    mask_init: str | None = None
    """With --decoder esp: what masks are: vocab_mean (also None), mean (of the prompt, moving with the text), zero,
    last_k, sample or mu_sigma."""
    repeats: bool = False
    """With --decoder esp: a candidate may be the token it follows, which it otherwise never is. For texts with runs of
    one token, such as the spaces of a model of bytes."""
    strict: bool = False
    """With --decoder esp: decide near-ties as plain decoding does, for models in bfloat16."""

    def run(self) -> int:
        """Writes to the terminal as tokens come; speed goes to standard error."""
        from effml import models

        sampling = self._sampling()
        self._esp()
        lines = self._lines()
        model = models.load(self.model).for_decoding()
        if model.tokenizer is None:
            raise ValueError(f"model {self.model!r} has no tokenizer, so it can't read a prompt")
        if lines is not None:
            return self._answer_all(model, sampling, lines)
        if self.chat:
            return self._chat(model, sampling)
        assert self.prompt is not None
        self._write(model, sampling, self.prompt, chat=False)
        return 0

    def _sampling(self) -> SamplingConfig:
        from effml import decode
        from effml._validate import one_of, positive, seed_in_range

        one_of("decoder", self.decoder, ("esp", "greedy", "sample"))
        one_of("cache", self.cache, ("dense", "ffd"))
        for name in ("delta", "cache_block"):
            if self.cache != "ffd" and getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --cache ffd")
        self._check_attention()
        positive("max_new_tokens", self.max_new_tokens)
        seed_in_range(self.seed)
        if (self.prompt is not None) + (self.prompts is not None) != 1 and not (
            self.chat and self.prompts is None
        ):
            raise ValueError("give either --prompt TEXT, --prompts FILE or --chat")
        if self.prompts is not None and self.chat:
            raise ValueError("--prompts and --chat exclude each other")
        drawing = self.decoder == "esp" and self.temperature is not None
        if self.decoder == "sample" or drawing:
            temperature = 1.0 if self.temperature is None else self.temperature
            return decode.SamplingConfig(temperature=temperature, top_k=self.top_k, top_p=self.top_p)
        if (self.temperature, self.top_k, self.top_p) != (None, None, None):
            needed = "a --temperature" if self.decoder == "esp" else "--decoder sample"
            raise ValueError(f"--temperature, --top-k and --top-p need {needed}")
        return decode.SamplingConfig()

    def _check_attention(self) -> None:
        from effml._validate import one_of

        if self.attention_mode != "sparse" and self.num_blocks is not None:
            raise ValueError("--num-blocks needs --attention-mode sparse")
        if self.attention_mode is None:
            return
        from effml.attend import ssa

        one_of("attention-mode", self.attention_mode, ssa.MODES)
        if self.cache != "dense":
            raise ValueError(
                "--attention-mode and --cache ffd exclude each other: each has a cache of its own"
            )
        if self.attention_mode == "sparse" and self.decoder == "esp":
            raise ValueError(
                "--decoder esp and --attention-mode sparse exclude each other: a block that fills up within a pass "
                "changes what is read. Use --decoder greedy or sample"
            )

    def _esp(self) -> ESPConfig | None:
        """The options of --decoder esp, or None for another."""
        given = {
            name: value
            for name in ("masks", "widths", "block_complexity", "mask_init")
            if (value := getattr(self, name)) is not None
        }
        if self.decoder != "esp":
            switches = [name for name in ("repeats", "strict") if getattr(self, name)]
            if given or switches:
                name = next(iter([*given, *switches])).replace("_", "-")
                raise ValueError(f"--{name} needs --decoder esp")
            return None
        from effml.decode.esp import ESPConfig

        if given.get("widths") == ():
            raise ValueError(
                "--widths needs the number of candidates for one token ahead or more: --widths 14"
            )
        if "widths" in given and "block_complexity" in given:
            raise ValueError("--widths and --block-complexity exclude each other")
        if "masks" in given:
            given["num_masks"] = given.pop("masks")
        elif "widths" in given:
            given["num_masks"] = len(given["widths"])
        # Several masks without widths: their candidates are spread by what the masks say.
        if "widths" not in given and ("block_complexity" in given or given.get("num_masks", 1) > 1):
            given["widths"] = None
        return ESPConfig(**given, prune_repeats=not self.repeats, strict=self.strict)

    def _cache(self, model: LoadedModel) -> dict[str, Any]:
        """What --cache and --attention-mode add to a decoder's arguments."""
        if self.attention_mode is not None and model.kind != "ssa":
            raise ValueError(
                f"model={model.name!r} is of kind {model.kind!r}; --attention-mode needs a model trained with SSA"
            )
        if self.attention_mode == "sparse":
            from effml.attend import ssa

            return ssa.decoding_options(model.config, mode="sparse", num_blocks=self.num_blocks)
        if self.cache == "dense":
            return {}
        from effml.attend import ffd

        block = self.cache_block
        if block is None:
            block = getattr(getattr(model.config, "attention", None), "block_size", 128)
            if block % 8:
                raise ValueError(
                    f"the model's blocks of {block} tokens do not fit --cache ffd, which needs a multiple of 8: "
                    "give --cache-block"
                )
        stacked = isinstance(model.params["layers"], Mapping)
        delta = 5.0 if self.delta is None else self.delta
        options = ffd.decoding_options(delta=delta, block=block, stacked=stacked)
        return options if self.decoder != "esp" else {**options, "block_size": block}

    def _lines(self) -> list[str] | None:
        if self.prompts is None:
            return None
        try:
            text = self.prompts.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts={str(self.prompts)!r} is not UTF-8 text ({error})") from None
        # Not splitlines(), to which form feeds and U+2028 inside a prompt are line ends too.
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            raise ValueError(f"prompts={str(self.prompts)!r} holds no prompt")
        return lines

    def _write(self, model: LoadedModel, sampling: SamplingConfig, prompt: str, *, chat: bool) -> str:
        """Streams one answer to standard output and returns it."""
        import jax

        from effml import decode
        from effml.decode import esp

        config = self._esp()
        options = {
            "max_new_tokens": self.max_new_tokens,
            "sampling": sampling,
            "key": jax.random.key(self.seed),
            "stop": self.stop,
            # A rendered chat spells the tokens it needs; in a plain prompt their names are text.
            "special_tokens": chat,
            "prefix": not chat,
            **self._cache(model),
        }
        written: TextStream | ESPStream[tuple[str, int]]
        if config is None:
            written = decode.stream_text(model, prompt, **options)
        else:
            written = esp.stream_text(model, prompt, config=config, **options)
        if not chat:
            print(prompt, end="", flush=True)
        pieces, count, started = [], 0, time.perf_counter()
        try:
            for piece, tokens in written:
                print(piece, end="", flush=True)
                pieces.append(piece)
                count += tokens
        finally:  # a stop in mid-stream keeps the text, and says what it took
            print(flush=True)
            seconds = time.perf_counter() - started
            if isinstance(written, esp.ESPStream):
                saved = _saved(written.stats) if count else ""
            else:
                saved = _kept(written.kept)
            print(
                f"[{count} tokens, {count / seconds:.1f} tokens/s with compilation{saved}]", file=sys.stderr
            )
        return "".join(pieces)

    def _answer_all(self, model: LoadedModel, sampling: SamplingConfig, lines: list[str]) -> int:
        """Answers all prompts in one batch; one JSON object for each goes to standard output."""
        import jax

        from effml import data, decode
        from effml.decode import esp

        encoded = [data.encode_prompt(model.tokenizer, line, special_tokens=False) for line in lines]
        tokens, lengths = decode.pad_prompts(encoded)
        config, options = (
            self._esp(),
            {
                "lengths": lengths,
                "max_new_tokens": self.max_new_tokens,
                "sampling": sampling,
                "key": jax.random.key(self.seed),
                "stop_ids": model.tokenizer.stop_ids,
                **self._cache(model),
            },
        )
        if config is None:
            written = decode.generate(model, tokens, **options)
            if written.kept is not None:
                print(f"[{written.lengths.sum()} tokens{_kept(written.kept)}]", file=sys.stderr)
        else:
            written = esp.generate(model, tokens, config=config, **options)
            print(f"[{written.lengths.sum()} tokens{_saved(written.stats)}]", file=sys.stderr)
        for line, row, length in zip(lines, written.tokens, written.lengths):
            stops = decode.StopTexts(self.stop)
            text = stops.push(model.tokenizer.decode(row[:length]))
            text += "" if stops.found is not None else stops.finish()
            print(json.dumps({"prompt": line, "text": text, "tokens": int(length)}, ensure_ascii=False))
        return 0

    def _chat(self, model: LoadedModel, sampling: SamplingConfig) -> int:
        """Answers message after message until the input ends."""
        from effml import decode

        messages: list[dict[str, str]] = []
        message = self.prompt
        while True:
            if message is None:
                try:
                    message = input("> " if sys.stdin.isatty() else "")
                except EOFError:
                    return 0
            if message.strip():
                messages.append({"role": "user", "content": message})
                prompt = decode.render_chat(
                    model.chat_template,
                    messages,
                    bos_token=model.tokenizer.decode(model.tokenizer.prefix_ids),
                    eos_token=model.tokenizer.decode([model.tokenizer.end_id]),
                )
                answer = self._write(model, sampling, prompt, chat=True)
                messages.append({"role": "assistant", "content": answer})
            if self.prompt is not None and not sys.stdin.isatty():
                return 0
            message = None


def _kept(share: float | None) -> str:
    """What of the cache was read, for the line of speed."""
    return "" if share is None else f", {share:.0%} of the cache's blocks read"


def _saved(stats: ESPStats) -> str:
    """What drafting saved, for the line of speed."""
    text = f", {stats.tau:.2f} tokens a pass, {stats.calls_saved:.0%} of calls saved"
    if stats.near_ties:
        text += f", {stats.near_ties} near-ties"
    if stats.divergences:
        text += f" ({stats.divergences} decided otherwise by a pass over one row)"
    return text
