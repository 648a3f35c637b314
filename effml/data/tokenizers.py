"""Text to token ids and back: bytes, or byte-level pairs (BPE) learned from the training text.

Both are lossless: `decode(encode(text)) == text` for any Unicode text. Ids are int32, and a tokenizer knows
the id that ends a document (`end_id`), the ids that end a generated answer (`stop_ids`) and the ids that its
model expects in front of every text (`prefix_ids`: Llama 3 and Mistral begin with a token of their own).
`encode` adds none of them; `encode_prompt` puts the prefix in front.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    array([110, 195, 169], dtype=int32)
    >>> tokenizer.decode([110, 195, 169])
    'né'
"""

from __future__ import annotations

import codecs
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from effml._validate import one_of
from effml.data._bpe import BpeTokenizer
from effml.data._tokens import META, check_tokens, read_meta, utf8, write_text
from effml.data.corpus import Corpus

__all__ = [
    "TOKENIZERS",
    "BpeTokenizer",
    "ByteTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "check_tokens",
    "encode_prompt",
    "load_tokenizer",
    "train_tokenizer",
]

TOKENIZERS = ("byte", "bpe")


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the library needs of a tokenizer.

    Attributes:
        kind: "byte" or "bpe"; how `load_tokenizer` tells them apart.
        vocab_size: one more than the largest id.
        end_id: the id put after every document.
        stop_ids: the ids that end a generated text.
        prefix_ids: the ids that a model of this tokenizer expects in front of a text; mostly none.

    Example:
        >>> isinstance(ByteTokenizer(), Tokenizer)
        True
    """

    @property
    def kind(self) -> str:
        """Name of the kind of tokenizer."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def end_id(self) -> int:
        """The id put after every document."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a generated text."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The ids in front of a text; `encode` leaves them out."""
        ...

    def encode(self, text: str, *, special_tokens: bool = True) -> Int32[np.ndarray, " length"]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Any) -> str:
        """Text of token ids."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the tokenizer into a folder."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte of UTF-8. Byte 0, which text files do not hold, ends a document.

    Example:
        >>> ByteTokenizer().vocab_size, ByteTokenizer().end_id
        (256, 0)
    """

    # Without annotations these are no fields of the dataclass: all byte tokenizers are equal.
    kind = "byte"
    vocab_size = 256
    end_id = 0
    stop_ids = (0,)
    prefix_ids = ()
    chat_template = None

    def encode(self, text: str, *, special_tokens: bool = True) -> Int32[np.ndarray, " length"]:
        """The bytes of a text.

        Args:
            text: any Unicode text.
            special_tokens: ignored; bytes have no special tokens.

        Returns:
            int32 ids, one per byte.

        Raises:
            TypeError: if `text` is not a string.
            ValueError: if it holds half of a surrogate pair, which is not text.

        Example:
            >>> ByteTokenizer().encode("ab").tolist()
            [97, 98]
        """
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """The text of bytes; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: ids in 0..255, as a list or an array.

        Raises:
            ValueError: for an id outside 0..255.

        Example:
            >>> ByteTokenizer().decode([104, 105])
            'hi'
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Any) -> bytes:
        """The bytes themselves.

        Example:
            >>> ByteTokenizer().decode_bytes([104, 105])
            b'hi'
        """
        return check_tokens(ids, self.vocab_size).astype(np.uint8).tobytes()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `effml_tokenizer.json` into a folder, which is made if it is missing.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> ByteTokenizer().save(folder)
            >>> load_tokenizer(folder)
            ByteTokenizer()
        """
        write_text(Path(folder) / META, json.dumps({"format": 1, "kind": self.kind}, indent=1))


class StreamDecoder:
    """Decodes ids as they come, never giving out half a character.

    The pieces joined together are `tokenizer.decode` of all ids.

    Args:
        tokenizer: the tokenizer of the ids.

    Example:
        >>> stream = StreamDecoder(ByteTokenizer())
        >>> [stream.push([byte]) for byte in "é!".encode()]
        ['', 'é', '!']
        >>> stream.finish()
        ''
    """

    # A token of other tokenizers may hold one byte of a character, and a character has at most four.
    _HELD = 4

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decode_bytes = getattr(tokenizer, "decode_bytes", lambda ids: None)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[
            int
        ] = []  # ids already given out, kept because a text may depend on what is before it
        self._pending: list[int] = []

    def push(self, ids: Any) -> str:
        """Takes the next ids and returns the text that is complete now, which may be empty.

        Example:
            >>> StreamDecoder(ByteTokenizer()).push(list(b"abc"))
            'abc'
        """
        checked = check_tokens(ids, 2**31)
        data = self._decode_bytes(checked)
        if data is not None:
            return self._decoder.decode(data)
        return "".join(map(self._push_one, checked.tolist()))

    def finish(self) -> str:
        """Returns what was held back: nothing, unless the ids ended inside a character.

        Example:
            >>> stream = StreamDecoder(ByteTokenizer())
            >>> stream.push([0xC3]), stream.finish()
            ('', '�')
        """
        return self._decoder.decode(b"", final=True) + self._release()

    def _push_one(self, number: int) -> str:
        self._pending.append(number)
        text = self._tokenizer.decode([*self._context, *self._pending])
        return "" if text.endswith("\ufffd") and len(self._pending) < self._HELD else self._release()

    def _release(self) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, *self._pending])[len(before) :]
        # Only the last group is needed as context, but it must not be empty text, which some decoders strip.
        self._context = [*(self._context if not text else []), *self._pending]
        self._pending = []
        return text


def encode_prompt(
    tokenizer: Tokenizer, text: str, *, special_tokens: bool = True
) -> Int32[np.ndarray, " length"]:
    """Token ids of a text that a model is to go on from: the tokenizer's `prefix_ids`, then those of the text.

    A text that spells the prefix itself, as a rendered chat does, does not get it twice.

    Args:
        tokenizer: the model's tokenizer.
        text: the prompt.
        special_tokens: whether names of special tokens in `text` are read as those tokens.

    Returns:
        int32 ids.

    Raises:
        ValueError: as `tokenizer.encode` does.

    Example:
        >>> encode_prompt(ByteTokenizer(), "ab").tolist()
        [97, 98]
    """
    prefix = np.asarray(tokenizer.prefix_ids, np.int32)
    ids = tokenizer.encode(text, special_tokens=special_tokens)
    begun = special_tokens and np.array_equal(ids[: len(prefix)], prefix)
    return ids if begun else np.concatenate([prefix, ids])


def train_tokenizer(name: str, corpus: Corpus, vocab_size: int = 4096) -> ByteTokenizer | BpeTokenizer:
    """The tokenizer called `name` for a corpus; what is learned is learned from the training side alone.

    Args:
        name: "byte" or "bpe".
        corpus: where the text comes from.
        vocab_size: most tokens of a learned tokenizer; bytes ignore it.

    Raises:
        ValueError: for an unknown name or a vocabulary that is too small.

    Example:
        >>> from effml.data import load_corpus
        >>> train_tokenizer("bpe", load_corpus("stdlib", max_bytes=50_000), vocab_size=300).vocab_size
        300
    """
    one_of("tokenizer", name, TOKENIZERS)
    if name == "byte":
        return ByteTokenizer()
    return BpeTokenizer.train((text for _, text in corpus.text("train")), vocab_size)


def load_tokenizer(folder: str | os.PathLike[str]) -> ByteTokenizer | BpeTokenizer:
    """Reads the tokenizer that `save` wrote into a folder.

    Args:
        folder: holds `effml_tokenizer.json`, and `tokenizer.json` for BPE.

    Raises:
        ValueError: if there is none, or if it is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ByteTokenizer().save(folder)
        >>> load_tokenizer(folder).vocab_size
        256
    """
    kind = one_of(f"tokenizer kind in {os.fspath(folder)!r}", str(read_meta(folder)["kind"]), TOKENIZERS)
    return ByteTokenizer() if kind == "byte" else BpeTokenizer.load(folder)
