"""Byte pair encoding, over the `tokenizers` package."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from effml.data._tokens import META, check_tokens, read_meta, utf8, write_text

__all__ = ["BpeTokenizer"]

END = "<|end|>"

_MODEL = "tokenizer.json"  # the name the Hugging Face packages look for
# The byte values that occur in UTF-8; the others need no token.
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1} - frozenset(range(0xF5, 0x100))


class BpeTokenizer:
    """Byte pair encoding of the `tokenizers` package: learned from texts, loaded, or taken from a model.

    Example:
        >>> tokenizer = BpeTokenizer.train(["to be or not to be"] * 20, vocab_size=270)
        >>> tokenizer.decode(tokenizer.encode("to be 🙂"))
        'to be 🙂'
    """

    kind = "bpe"

    def __init__(self, tokenizer: Any, end_id: int, chat_template: str | None, stop_ids: tuple[int, ...]):
        """Use `train`, `load` or `from_tokenizer`."""
        self.tokenizer = tokenizer
        self.end_id = end_id
        self.chat_template = chat_template
        self.stop_ids = stop_ids
        self.prefix_ids = _prefix_ids(tokenizer)
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        for name, ids in (("end_id", (end_id,)), ("stop_ids", stop_ids)):
            for number in ids:
                if not 0 <= number < self.vocab_size:
                    raise ValueError(f"{name}={number!r} is outside the vocabulary 0..{self.vocab_size - 1}")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Learns byte-level BPE; the same texts give the same tokenizer, in any order of equal texts.

        Args:
            texts: the training texts.
            vocab_size: most tokens to have, at least 257 (256 bytes and the end of a document). Short texts
                may hold too few pairs to reach it: read the `vocab_size` of the result.

        Returns:
            The tokenizer; its end of document is `<|end|>`.

        Raises:
            ValueError: if `vocab_size` is below 257.

        Source: Sennrich et al. 2016, arXiv:1508.07909, over bytes as in GPT-2.

        Example:
            >>> BpeTokenizer.train(["aa aa aa"], vocab_size=258).vocab_size
            258
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if vocab_size < 257:
            raise ValueError(f"vocab_size={vocab_size!r} must be at least 257: 256 bytes and {END!r}")
        backend: Any = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(iter(texts), trainer)
        return cls.from_tokenizer(backend, backend.token_to_id(END))

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        end_id: int,
        chat_template: str | None = None,
        *,
        stop_ids: Sequence[int] | None = None,
    ) -> BpeTokenizer:
        """Wraps a `tokenizers.Tokenizer`, such as one that came with a model.

        Padding and truncation, which some shipped tokenizers switch on, are off in the result. What its
        post-processor puts in front of a text becomes `prefix_ids`; what it puts behind is left out.

        Args:
            tokenizer: a `tokenizers.Tokenizer`; it is not changed.
            end_id: id that ends a document.
            chat_template: Jinja template of a chat model.
            stop_ids: ids that end a generated text; None for `end_id` alone.

        Raises:
            ValueError: if an id is outside the vocabulary.

        Example:
            >>> inner = BpeTokenizer.train(["a b c"], vocab_size=257).tokenizer
            >>> BpeTokenizer.from_tokenizer(inner, 0, stop_ids=[0, 5]).stop_ids
            (0, 5)
        """
        if tokenizer.padding is not None or tokenizer.truncation is not None:
            tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            tokenizer.no_padding()
            tokenizer.no_truncation()
        return cls(tokenizer, end_id, chat_template, (end_id,) if stop_ids is None else tuple(stop_ids))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> BpeTokenizer:
        """Reads what `save` wrote; `load_tokenizer` reads any kind.

        Raises:
            ValueError: if the folder holds no such tokenizer, or a damaged one.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> BpeTokenizer.train(["a b c"], vocab_size=257).save(folder)
            >>> BpeTokenizer.load(folder).vocab_size
            257
        """
        meta = read_meta(folder)
        if meta["kind"] != cls.kind:
            raise ValueError(
                f"{os.fspath(folder)!r} holds a tokenizer of kind {meta['kind']!r}, not {cls.kind!r}"
            )
        from tokenizers import Tokenizer as Backend

        path = Path(folder) / _MODEL
        try:
            model = path.read_text("utf-8")
            if hashlib.sha256(model.encode()).hexdigest() != meta["tokenizer_sha256"]:
                raise ValueError(f"its content is not the one that {META} describes")
            backend = Backend.from_str(model)
            end_id, template, stop_ids = meta["end_id"], meta["chat_template"], meta["stop_ids"]
        except KeyError as error:
            raise ValueError(f"{str(Path(folder) / META)!r} is damaged: {error} is missing") from None
        except Exception as error:  # the package raises plain Exception for a file it cannot parse
            raise ValueError(f"{str(path)!r} is missing or damaged: {error}") from None
        return cls.from_tokenizer(backend, end_id, template, stop_ids=stop_ids)

    @cached_property
    def _byte_level(self) -> bool:
        return (json.loads(self.tokenizer.to_str()).get("decoder") or {}).get("type") == "ByteLevel"

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        """The bytes of every id of a byte-level tokenizer; nothing for ids without a token."""
        table = [b""] * self.vocab_size
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        for token, number in self.tokenizer.get_vocab(with_added_tokens=False).items():
            if all(character in byte_of for character in token):
                table[number] = bytes(byte_of[character] for character in token)
            else:
                table[number] = token.encode()
        for number, token in self.tokenizer.get_added_tokens_decoder().items():
            table[number] = token.content.encode()
        return table

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        return (
            frozenset(b for b, character in enumerate(_byte_characters()) if character not in vocabulary)
            & _UTF8_BYTES
        )

    @cached_property
    def _plain(self) -> Any:
        """The same tokenizer, reading the names of special tokens as ordinary text."""
        plain = type(self.tokenizer).from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, *, special_tokens: bool = True) -> Int32[np.ndarray, " length"]:
        """Token ids of a text. Nothing is added in front or behind (`encode_prompt` adds `prefix_ids`).

        Args:
            text: any Unicode text.
            special_tokens: whether names such as `<|end|>` in the text become that one token (a rendered
                chat needs it) or are ordinary characters (text of others should not be able to end a
                document).

        Returns:
            int32 ids.

        Raises:
            TypeError: if `text` is not a string.
            ValueError: naming the characters, if the vocabulary has no tokens for them.

        Example:
            >>> tokenizer = BpeTokenizer.train(["a b c"], vocab_size=257)
            >>> len(tokenizer.encode("<|end|>")), len(tokenizer.encode("<|end|>", special_tokens=False))
            (1, 7)
        """
        data = utf8(text)
        backend = self.tokenizer if special_tokens else self._plain
        if self._byte_level and not self._missing_bytes:
            # The batched form is the one that leaves out the character offsets, a fifth of the time.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
            return np.asarray(encoding.ids, np.int32)
        if self._byte_level and self._missing_bytes.intersection(data):
            _unknown([c for c in text if self._missing_bytes.intersection(c.encode())])
        encoding = backend.encode(text, add_special_tokens=False)
        if not self._byte_level:
            self._check_known(text, encoding)
        return np.asarray(encoding.ids, np.int32)

    def _check_known(self, text: str, encoding: Any) -> None:
        """Raises if characters became the unknown token, or vanished, as in BPE without one."""
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        covered = np.zeros(len(text), bool)
        for token, (start, stop) in zip(encoding.tokens, encoding.offsets):
            if token != unknown:
                covered[start:stop] = True
        _unknown([c for c, known in zip(text, covered) if not known and not c.isspace()])

    def decode(self, ids: Any) -> str:
        """The text of token ids, special tokens by their names; incomplete UTF-8 becomes U+FFFD.

        Args:
            ids: ids from 0, as a list or an array. Ids that no token has (models pad their vocabularies)
                give no text.

        Raises:
            ValueError: for a negative id.

        Example:
            >>> tokenizer = BpeTokenizer.train(["a b c"], vocab_size=257)
            >>> tokenizer.decode([*tokenizer.encode("a b"), tokenizer.end_id])
            'a b<|end|>'
        """
        checked = check_tokens(ids, 2**31)
        data = self.decode_bytes(checked)
        if data is not None:
            return data.decode("utf-8", "replace")
        return self.tokenizer.decode(checked[checked < self.vocab_size].tolist(), skip_special_tokens=False)

    def decode_bytes(self, ids: Any) -> bytes | None:
        """The bytes of token ids, or None if this tokenizer's tokens are not made of bytes.

        Example:
            >>> BpeTokenizer.train(["a b c"], vocab_size=257).decode_bytes([0])
            b'<|end|>'
        """
        if not self._byte_level:
            return None
        return b"".join(self._bytes_of[i] for i in np.asarray(ids).tolist() if i < self.vocab_size)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and `effml_tokenizer.json` into a folder, which is made if it is missing.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> BpeTokenizer.train(["a b c"], vocab_size=257).save(folder)
            >>> sorted(os.listdir(folder))
            ['effml_tokenizer.json', 'tokenizer.json']
        """
        model = self.tokenizer.to_str()
        meta = {
            "format": 1,
            "kind": self.kind,
            "end_id": self.end_id,
            "stop_ids": list(self.stop_ids),
            "chat_template": self.chat_template,
            # Tells an interrupted overwrite, which leaves files of two tokenizers, from a whole one.
            "tokenizer_sha256": hashlib.sha256(model.encode()).hexdigest(),
        }
        write_text(Path(folder) / _MODEL, model)
        write_text(Path(folder) / META, json.dumps(meta, indent=1))


def _prefix_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that a tokenizer's post-processor puts in front of a text."""
    if tokenizer.post_processor is None:
        return ()
    # An empty text would not tell front from back; any text with a token of its own does.
    for probe in ("a", *tokenizer.get_vocab(with_added_tokens=False)):
        encoding = tokenizer.encode(probe)
        if 0 in encoding.special_tokens_mask:
            return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
    return ()


def _unknown(characters: Sequence[str]) -> None:
    distinct = list(dict.fromkeys(characters))
    if distinct:
        shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in distinct[:8])
        more = f" and {len(distinct) - 8} more" if len(distinct) > 8 else ""
        raise ValueError(f"the tokenizer has no tokens for {shown}{more}")


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (printable ones for themselves)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
