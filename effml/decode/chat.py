"""Chats as text: rendering a model's chat template, and ending an answer at a given text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from effml._validate import missing_package

__all__ = ["StopTexts", "render_chat"]


def render_chat(
    template: str | None,
    messages: Sequence[Any],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """The text of a conversation, as the model was trained to read it.

    The template is Jinja, rendered in the sandbox and with the helpers (`raise_exception`, `strftime_now`,
    `tojson`, loop controls, `generation` blocks) that Hugging Face gives its templates. It comes with the model
    and is not trusted: it can neither reach Python's internals nor change what it is given.

    Args:
        template: the model's `chat_template`.
        messages: `{"role": "system" | "user" | "assistant" | ..., "content": text}`, oldest first.
        add_generation_prompt: whether to end with the beginning of an answer.
        bos_token: text of the token that begins a document, for templates that name it.
        eos_token: text of the token that ends one.
        **variables: more names that the template knows, such as `tools`.

    Returns:
        Text to encode with `special_tokens=True`.

    Raises:
        ValueError: if there is no template, no message, a message without role or content, or the template
            is faulty or refuses the messages (with its reason).
        ImportError: if jinja2 is not installed, with its pip line.

    Example:
        >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> render_chat(template, [{"role": "user", "content": "Hello"}])
        '<user>Hello'
    """
    if not template:
        raise ValueError("the model has no chat template, so it can't chat: give it a plain prompt instead")
    if not messages:
        raise ValueError("messages is empty: a chat needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"messages[{index}]={message!r} must have a role and a content")
    try:
        import jinja2
    except ImportError:
        raise missing_package("jinja2", "pip install 'effml[hub]'", "render a chat template") from None
    try:
        compiled = _environment().from_string(template)
        return compiled.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            # Templates ask whether tools are defined *and* not none, as Hugging Face always defines them.
            **{"tools": None, "documents": None, **variables},
        )
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is faulty at line {error.lineno}: {error.message}") from None
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None


def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here it is only its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **kwargs: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **kwargs)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class StopTexts:
    """Passes text through until one of the given texts has come, which is never given out, not even in part.

    Of several stop texts, the one that is complete first counts (the longest of those that end together), so
    the result does not depend on the pieces in which the text comes.

    Attributes:
        found: the stop text that came, or None.

    Args:
        texts: what ends the text; none at all is allowed.

    Raises:
        ValueError: for an empty stop text.

    Example:
        >>> stops = StopTexts(["\\n\\n"])
        >>> [stops.push(piece) for piece in ("one\\n", "two\\n", "\\nthree")]
        ['one', '\\ntwo', '']
        >>> stops.found
        '\\n\\n'
    """

    def __init__(self, texts: Sequence[str]):
        if isinstance(texts, str):
            raise TypeError(f"stop={texts!r} must be a list of texts, not one text")
        if not all(texts):
            raise ValueError(f"stop={list(texts)!r}: a stop text must not be empty")
        self._texts = tuple(texts)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Takes the next piece and returns what can be given out, which may be empty.

        Example:
            >>> StopTexts(["END"]).push("some E")
            'some '
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._texts if stop in text]
        if hits:
            end, _, self.found = min(hits)
            self._held = ""
            return text[: end - len(self.found)]
        held = max(
            (n for stop in self._texts for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, when no more text comes.

        Example:
            >>> stops = StopTexts(["END"])
            >>> stops.push("some E"), stops.finish()
            ('some ', 'E')
        """
        held, self._held = self._held, ""
        return held
