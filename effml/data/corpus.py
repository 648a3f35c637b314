"""Text corpora: which files are read, and which of them are held out.

Heart: the split is made by *file* and by a hash of the file's relative path, so it is the same in every
process and on every machine, and adding a file moves none of the others. With u(name) uniform on [0, 1),

    file is held out  <=>  u(name) < held_out_fraction

Detail: a text that occurs twice is kept once (a copy on the training side wins, so no text is ever trained
on and then measured); neither side is left empty when there are two files or more; a single file is cut in
two at a line end.

    >>> corpus = load_corpus("stdlib", max_bytes=200_000)
    >>> name, text = next(corpus.text("train"))
    >>> name.endswith(".py")
    True
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from effml._validate import one_of, positive
from effml.data._files import candidates, no_text, read_text

__all__ = ["SPLITS", "Corpus", "Document", "load_corpus"]

SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Document:
    """A part of one text file.

    Attributes:
        path: where the file is.
        name: its path relative to the corpus, with forward slashes.
        start: first character of the part, counted in the text after newline normalisation.
        stop: one past its last character.
        size: bytes of the part in UTF-8.
        digest: hash of the whole file's text, to notice a file that changes later.

    Example:
        >>> Document(Path("/data/a.txt"), "a.txt", 0, 5, 5, "").stop
        5
    """

    path: Path
    name: str
    start: int
    stop: int
    size: int
    digest: str


@dataclass(frozen=True)
class Corpus:
    """Text split into a training and a held-out side. Made by `load_corpus`; holds no text itself.

    Attributes:
        source: what was asked for: "stdlib", a folder or a file.
        train_documents: the training side, sorted by name.
        held_out_documents: the held-out side, sorted by name.
        skipped: (reason, count) of the files that were found and not used.

    Example:
        >>> corpus = load_corpus("stdlib", max_bytes=100_000)
        >>> set(corpus.train) & set(corpus.held_out)
        set()
    """

    source: str
    train_documents: tuple[Document, ...]
    held_out_documents: tuple[Document, ...]
    skipped: tuple[tuple[str, int], ...] = ()

    @property
    def train(self) -> tuple[Path, ...]:
        """Files of the training side."""
        return tuple(document.path for document in self.train_documents)

    @property
    def held_out(self) -> tuple[Path, ...]:
        """Files of the held-out side (the same file as `train` when the corpus is one single file)."""
        return tuple(document.path for document in self.held_out_documents)

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change when any text, any name or the split changes.

        Example:
            >>> len(load_corpus("stdlib", max_bytes=50_000).fingerprint)
            16
        """
        digest = hashlib.blake2b(digest_size=8)
        for split in SPLITS:
            for document in self.documents(split):
                key = (split, document.start, document.stop, document.digest)
                digest.update(repr(key).encode() + _name_bytes(document.name))
        return digest.hexdigest()

    def documents(self, split: str) -> tuple[Document, ...]:
        """The documents of one side.

        Args:
            split: "train" or "held_out".

        Raises:
            ValueError: for another split.

        Example:
            >>> len(load_corpus("stdlib", max_bytes=50_000).documents("held_out")) >= 1
            True
        """
        one_of("split", split, SPLITS)
        return self.train_documents if split == "train" else self.held_out_documents

    def text(self, split: str) -> Iterator[tuple[str, str]]:
        """Reads one side, file by file.

        Args:
            split: "train" or "held_out".

        Returns:
            Iterator of (name, text), sorted by name. Newlines are `\\n` and a byte order mark is removed.

        Raises:
            ValueError: for another split, or when a file was changed or removed since the corpus was loaded.

        Example:
            >>> texts = dict(load_corpus("stdlib", max_bytes=50_000).text("held_out"))
            >>> all(text for text in texts.values())
            True
        """
        return map(_read_document, self.documents(split))

    def describe(self) -> str:
        """One line for people: files and bytes of both sides, and what was skipped and why.

        Example:
            >>> print(load_corpus("stdlib", max_bytes=50_000).describe())
            stdlib: ... train, ... held out...
        """
        sides = []
        for split, label in zip(SPLITS, ("train", "held out")):
            documents = self.documents(split)
            files = f"{len(documents):,} file{'s' if len(documents) != 1 else ''}"
            sides.append(f"{files} ({sum(d.size for d in documents) / 1e6:.2f} MB) {label}")
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped)
        return f"{self.source}: {', '.join(sides)}" + (f"; skipped {skipped}" if skipped else "")


def load_corpus(
    source: str | os.PathLike[str], *, held_out_fraction: float = 0.1, max_bytes: int | None = None
) -> Corpus:
    """Finds the text of a source and splits it into a training and a held-out side.

    With two different files or more, whole files are held out: those whose path hashes below
    `held_out_fraction` (at least one, and at least one is left for training). With a single file, its last
    `held_out_fraction` is held out, cut at the nearest line end.

    Args:
        source: "stdlib", a folder, or one file; see `source_files`.
        held_out_fraction: share of the files to hold out, between 0 and 1 (exclusive).
        max_bytes: most bytes of UTF-8 to use, shared between the sides by `held_out_fraction`; None for
            all. Files are taken in the order of their hash, so a small corpus is a sample of the whole
            folder; the file that crosses the limit is cut at a line end. Files after it are not read.

    Returns:
        The corpus; its texts are read when asked for.

    Raises:
        ValueError: if the source does not exist, holds no text, or the numbers leave one side empty.
        TypeError: if `source` is not a path.

    Example:
        >>> load_corpus("stdlib", max_bytes=1_000_000) == load_corpus("stdlib", max_bytes=1_000_000)
        True
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction={held_out_fraction!r} must be above 0 and below 1")
    if max_bytes is not None and positive("max_bytes", max_bytes) < 2:
        raise ValueError(f"max_bytes={max_bytes!r} must be at least 2, one for each side")
    skipped: Counter[str] = Counter()
    train, held_out = _split_files(candidates(source, skipped), held_out_fraction, max_bytes, skipped)
    if not train.documents:
        raise no_text(source, skipped)
    if not held_out.documents:
        (document,) = train.documents.values()
        train, held_out = _split_text(document, held_out_fraction, max_bytes)
    for label, side in (("training", train), ("held-out", held_out)):
        if not side.sorted():
            why = (
                "is too short to split" if max_bytes is None else f"with max_bytes={max_bytes!r} is too short"
            )
            raise ValueError(f"data source {os.fspath(source)!r} {why}: no text is left on the {label} side")
    return Corpus(os.fspath(source), train.sorted(), held_out.sorted(), tuple(sorted(skipped.items())))


def _split_files(
    files: list[tuple[str, Path]], fraction: float, max_bytes: int | None, skipped: Counter[str]
) -> tuple[_Side, _Side]:
    """Both sides of a folder; the held-out one is empty if there is just one different text."""
    train, held_out = _Side(None), _Side(None)
    if max_bytes is not None:
        held_out.budget = min(max(round(max_bytes * fraction), 1), max_bytes - 1)
        train.budget = max_bytes - held_out.budget
    digests: set[str] = set()
    read: set[str] = set()

    def take(name: str, path: Path, side: _Side) -> None:
        read.add(name)
        text, reason = read_text(path)
        digest = _digest(text)
        if not reason and digest in digests:
            reason = "duplicate"
        if reason:
            skipped[reason] += 1
            return
        digests.add(digest)
        side.add(path, name, text, digest)

    # Highest hash first, so training files are read first: of a text that is on both sides that copy stays.
    order = sorted(((_uniform(name), name, path) for name, path in files), reverse=True)
    for uniform, name, path in order:
        side = train if uniform >= fraction or not train.documents else held_out
        if not side.full:
            take(name, path, side)
    # Nothing hashed below the fraction: the lowest hash is held out.
    for _, name, path in reversed(order):
        if held_out.documents:
            break
        if name in train.documents and len(train.documents) > 1:
            held_out.add(path, name, read_text(path)[0], train.documents.pop(name).digest)
        elif name not in read:
            take(name, path, held_out)
    return train, held_out


def _split_text(document: Document, fraction: float, max_bytes: int | None) -> tuple[_Side, _Side]:
    """Leading and trailing part of one text, cut at the line end nearest to the fraction, if there is one."""
    text, _ = read_text(document.path)
    total = len(text) if max_bytes is None else _cut(text, max_bytes)
    aim = max(1, min(round(total * (1 - fraction)), total - 1))
    before, after = text.rfind("\n", 0, aim) + 1, text.find("\n", aim) + 1
    ends = [end for end in (before, after) if 0 < end < total]
    middle = min(ends, key=lambda end: abs(end - aim)) if ends else aim
    train, held_out = _Side(None), _Side(None)
    train.add(document.path, document.name, text, document.digest, 0, middle)
    held_out.add(document.path, document.name, text, document.digest, middle, total)
    return train, held_out


class _Side:
    """One side of a split while it is being filled, up to a number of bytes."""

    def __init__(self, budget: int | None):
        self.budget = budget
        self.used = 0
        self.documents: dict[str, Document] = {}

    @property
    def full(self) -> bool:
        return self.budget is not None and self.used >= self.budget

    def add(
        self, path: Path, name: str, text: str, digest: str, start: int = 0, stop: int | None = None
    ) -> None:
        stop = len(text) if stop is None else stop
        if self.budget is not None:
            left = self.budget - self.used
            if len(text.encode()) > left:
                stop = _cut(text, left)
                self.used = self.budget
        size = len(text[start:stop].encode())
        self.used += size
        self.documents[name] = Document(path, name, start, stop, size, digest)

    def sorted(self) -> tuple[Document, ...]:
        return tuple(document for _, document in sorted(self.documents.items()) if document.size)


def _read_document(document: Document) -> tuple[str, str]:
    text, reason = read_text(document.path)
    if reason or _digest(text) != document.digest:
        raise ValueError(
            f"{str(document.path)!r} changed since the corpus was loaded ({reason or 'other text'})"
        )
    return document.name, text[document.start : document.stop]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _name_bytes(name: str) -> bytes:
    # One spelling of accents on every file system; names that are not UTF-8 keep their bytes.
    return unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape")


def _uniform(name: str) -> float:
    digest = hashlib.blake2b(_name_bytes(name), digest_size=6, person=b"effml split")
    return int.from_bytes(digest.digest(), "big") / 2.0**48


def _cut(text: str, max_bytes: int) -> int:
    """Characters of the longest leading part within `max_bytes`, ended at a line end where there is one."""
    part = text.encode()[:max_bytes].decode("utf-8", "ignore")
    return len(part) if len(part) == len(text) else (part.rfind("\n") + 1 or len(part))
