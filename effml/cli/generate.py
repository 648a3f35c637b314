"""Let a model write: from a prompt, a file of prompts, or in a chat."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from effml.decode import SamplingConfig
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
    """greedy (the most likely token each time) or sample."""
    cache: str = "dense"
    """dense: keys and values as they are."""
    temperature: float | None = None
    """With --decoder sample: below 1 keeps closer to the likeliest tokens, above 1 is more varied; None is 1."""
    top_k: int | None = None
    """With --decoder sample: choose among the k most likely tokens only."""
    top_p: float | None = None
    """With --decoder sample: choose among the likeliest tokens that hold this probability together."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not printed."""
    seed: int = 0

    def run(self) -> int:
        """Writes to the terminal as tokens come; speed goes to standard error."""
        from effml import models

        sampling = self._sampling()
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

        one_of("decoder", self.decoder, ("greedy", "sample"))
        one_of("cache", self.cache, ("dense",))
        positive("max_new_tokens", self.max_new_tokens)
        seed_in_range(self.seed)
        if (self.prompt is not None) + (self.prompts is not None) != 1 and not (
            self.chat and self.prompts is None
        ):
            raise ValueError("give either --prompt TEXT, --prompts FILE or --chat")
        if self.prompts is not None and self.chat:
            raise ValueError("--prompts and --chat exclude each other")
        if self.decoder == "sample":
            temperature = 1.0 if self.temperature is None else self.temperature
            return decode.SamplingConfig(temperature=temperature, top_k=self.top_k, top_p=self.top_p)
        if (self.temperature, self.top_k, self.top_p) != (None, None, None):
            raise ValueError("--temperature, --top-k and --top-p need --decoder sample")
        return decode.SamplingConfig()

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

        written = decode.stream_text(
            model,
            prompt,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            key=jax.random.key(self.seed),
            stop=self.stop,
            # A rendered chat spells the tokens it needs; in a plain prompt their names are text.
            special_tokens=chat,
            prefix=not chat,
        )
        if not chat:
            print(prompt, end="", flush=True)
        pieces, count, started = [], 0, time.perf_counter()
        for piece, tokens in written:
            print(piece, end="", flush=True)
            pieces.append(piece)
            count += tokens
        print(flush=True)
        seconds = time.perf_counter() - started
        print(f"[{count} tokens, {count / seconds:.1f} tokens/s with compilation]", file=sys.stderr)
        return "".join(pieces)

    def _answer_all(self, model: LoadedModel, sampling: SamplingConfig, lines: list[str]) -> int:
        """Answers all prompts in one batch; one JSON object for each goes to standard output."""
        import jax

        from effml import data, decode

        encoded = [data.encode_prompt(model.tokenizer, line, special_tokens=False) for line in lines]
        tokens, lengths = decode.pad_prompts(encoded)
        written = decode.generate(
            model,
            tokens,
            lengths=lengths,
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            key=jax.random.key(self.seed),
            stop_ids=model.tokenizer.stop_ids,
        )
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
