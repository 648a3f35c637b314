"""Token streams and the batches cut from them.

A stream t[0..n) is cut into windows with stride L (the length), each with one token more than its stride:

    window k = t[kL], ..., t[kL + L]      inputs: all but the last token; targets: all but the first

so neighbouring windows share one token and every target t[1..n) belongs to exactly one window. Documents
are not
padded: they follow each other in the stream, each with an end token behind it.

    >>> import numpy as np
    >>> it = batches(np.arange(9), batch_size=2, length=2, seed=0, epochs=1)
    >>> sorted(row.tolist() for batch in it for row in batch["tokens"])
    [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]]
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer

from effml._validate import count
from effml.data.corpus import Corpus
from effml.data.tokenizers import Tokenizer

__all__ = [
    "BatchIterator",
    "ResumableBatches",
    "WindowBatches",
    "batches",
    "encode_corpus",
    "evaluation_batches",
]

Batch = dict[str, np.ndarray]


@lru_cache(maxsize=4)
def encode_corpus(corpus: Corpus, split: str, tokenizer: Tokenizer) -> Int32[np.ndarray, " tokens"]:
    """One side of a corpus as one token stream: its documents in order, `end_id` behind each.

    Text that spells a special token's name stays text. The last few results are kept in memory.

    Args:
        corpus: the corpus.
        split: "train" or "held_out".
        tokenizer: the tokenizer.

    Returns:
        int32 ids; the array is read-only.

    Raises:
        ValueError: for another split, or a file that changed since the corpus was loaded.

    Example:
        >>> from effml.data import ByteTokenizer, load_corpus
        >>> corpus = load_corpus("stdlib", max_bytes=50_000)
        >>> int(encode_corpus(corpus, "held_out", ByteTokenizer())[-1])
        0
    """
    end = np.asarray([tokenizer.end_id], np.int32)
    parts: list[np.ndarray] = []
    for _, text in corpus.text(split):
        parts += [tokenizer.encode(text, special_tokens=False), end]
    stream = np.concatenate(parts)
    stream.setflags(write=False)
    return stream


@runtime_checkable
class BatchIterator(Protocol):
    """An iterator of batches that can be saved and resumed exactly; what `batches` returns.

    Where grain is installed it is also a `grain.DatasetIterator`.

    Example:
        >>> import numpy as np
        >>> isinstance(batches(np.arange(9), batch_size=2, length=2, seed=0), BatchIterator)
        True
    """

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""
        ...

    def __next__(self) -> Batch:
        """The next batch."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands, as plain JSON types."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state."""
        ...


class WindowBatches:
    """Random access to shuffled batches by step; the order is a function of the seed and the step alone.

    Suits `grain.MapDataset.source(...)` for pipelines of one's own. Arguments as for `batches`, which
    checks them.

    Example:
        >>> import numpy as np
        >>> source = WindowBatches(np.arange(9, dtype=np.int32), 2, 2, seed=0, epochs=3)
        >>> len(source), source[5]["tokens"].shape
        (6, (2, 3))
    """

    def __init__(
        self,
        tokens: Int32[np.ndarray, " tokens"],
        batch_size: int,
        length: int,
        seed: int,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        self._batch_size, self._length, self._seed = batch_size, length, seed
        self._rows = batch_size // process_count
        self._first_row = process_index * self._rows
        self.batches_per_epoch = len(self._windows) // batch_size
        self._steps = sys.maxsize if epochs is None else epochs * self.batches_per_epoch
        self._order: tuple[int, np.ndarray] | None = None
        content = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=8).hexdigest()
        # The number of processes is left out: a run may go on with another one.
        self.identity = {"tokens": content, "batch_size": batch_size, "length": length, "seed": seed}

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < self._steps:
            raise IndexError(f"batch {step} of {self._steps}")
        epoch, place = divmod(int(step), self.batches_per_epoch)
        cached = self._order
        if cached is None or cached[0] != epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
            cached = self._order = (epoch, generator.permutation(len(self._windows)))
        start = place * self._batch_size + self._first_row
        rows = self._windows[cached[1][start : start + self._rows]]
        return {"tokens": rows, "weights": np.ones((self._rows, self._length), np.float32)}


class ResumableBatches:
    """Iterates over `WindowBatches` in order and remembers the step.

    Example:
        >>> import numpy as np
        >>> it = ResumableBatches(WindowBatches(np.arange(9, dtype=np.int32), 2, 2, seed=0))
        >>> _ = next(it)
        >>> it.get_state()["step"]
        1
    """

    def __init__(self, source: WindowBatches):
        self._source = source
        self._step = 0

    def __iter__(self) -> ResumableBatches:
        return self

    def __next__(self) -> Batch:
        if self._step >= len(self._source):
            raise StopIteration
        batch = self._source[self._step]
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The step and what the batches are made of, as plain JSON types.

        Example:
            >>> import numpy as np
            >>> it = batches(np.arange(9), batch_size=2, length=2, seed=0)
            >>> sorted(it.get_state())
            ['batch_size', 'length', 'seed', 'step', 'tokens']
        """
        return {"step": self._step, **self._source.identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `get_state` was called.

        Raises:
            ValueError: if the state is of other tokens, another batch size, length or seed.

        Example:
            >>> import numpy as np
            >>> it = batches(np.arange(9), batch_size=2, length=2, seed=0)
            >>> it.set_state(batches(np.arange(9), batch_size=2, length=2, seed=1).get_state())
            Traceback (most recent call last):
            ...
            ValueError: the saved position is of other batches: seed was 1, is 0
        """
        missing = {"step", *self._source.identity} - set(state)
        if missing:
            raise ValueError(f"the saved position lacks {', '.join(sorted(missing))}")
        differences = [
            f"{k} was {state[k]}, is {v}" for k, v in self._source.identity.items() if state[k] != v
        ]
        if differences:
            raise ValueError(f"the saved position is of other batches: {'; '.join(differences)}")
        step = operator.index(state["step"])
        if not 0 <= step <= len(self._source):
            raise ValueError(f"the saved position is step {step} of {len(self._source)}")
        self._step = step


def batches(
    tokens: Integer[np.ndarray, " tokens"],
    *,
    batch_size: int,
    length: int,
    seed: int,
    epochs: int | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> BatchIterator:
    """Shuffled training batches of a token stream.

    Every epoch visits the windows in a new order given by the seed; windows that do not fill a last batch,
    and tokens that do not fill a last window, are left out of that epoch. With several processes each one
    gets its own rows of the same global batch, so training does not depend on how many there are.

    Args:
        tokens: int[n] token ids.
        batch_size: rows of a global batch, B.
        length: targets per row, L.
        seed: seed of the order, 0 or above.
        epochs: passes over the tokens; None to go on for ever.
        process_index: this process; None to ask `jax.distributed`, which must be initialised before.
        process_count: all processes; None likewise. It must divide `batch_size`.

    Returns:
        Iterator of {"tokens": int32[B / process_count, L + 1], "weights": float32[B / process_count, L],
        all one}. `get_state()` is a small dict of plain JSON types; `set_state` continues exactly there and
        refuses a state of other tokens, batch size, length or seed. A `grain.DatasetIterator` where grain
        is installed.

    Raises:
        ValueError: for numbers that are not positive, too few tokens for one batch, or a process out of
            range.
        TypeError: if the tokens are not a stream of integers, or a size is no integer.

    Example:
        >>> import numpy as np
        >>> batch = next(batches(np.arange(1000), batch_size=4, length=16, seed=0))
        >>> batch["tokens"].shape, batch["weights"].shape
        ((4, 17), (4, 16))
    """
    stream = _stream(tokens, batch_size, length)
    if epochs is not None:
        count("epochs", epochs)
    if seed < 0:
        raise ValueError(f"seed={seed!r} must not be negative")
    if (process_index is None) != (process_count is None):
        raise ValueError("give process_index and process_count together, or neither")
    if process_index is None or process_count is None:
        process_index, process_count = _this_process()
    count("process_count", process_count)
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index!r} must be in 0..{process_count - 1}")
    if batch_size % process_count:
        raise ValueError(f"batch_size={batch_size!r} is not divisible by process_count={process_count!r}")
    needed = batch_size * length + 1
    if len(stream) < needed:
        raise ValueError(
            f"the text is shorter than one batch: {len(stream):,} tokens are there, "
            f"batch_size={batch_size} x length={length} needs {needed:,}"
        )
    source = WindowBatches(stream, batch_size, length, seed, epochs, process_index, process_count)
    try:
        from effml.data._grain import GrainBatches
    except ModuleNotFoundError:  # a machine with only jax and numpy gets the same batches
        return ResumableBatches(source)
    return GrainBatches(source)


def evaluation_batches(
    tokens: Integer[np.ndarray, " tokens"], *, batch_size: int, length: int
) -> list[Batch]:
    """Batches in order that hold every target of a token stream exactly once.

    Args:
        tokens: int[n] token ids, n >= 2.
        batch_size: rows of each batch, B.
        length: targets per row, L.

    Returns:
        List of {"tokens": int32[B, L + 1], "weights": float32[B, L]}. All have the same shape; the weights
        are one for the n - 1 targets and zero for what pads the last batch.

    Raises:
        ValueError: for numbers that are not positive or fewer than two tokens.
        TypeError: if the tokens are not a stream of integers.

    Example:
        >>> import numpy as np
        >>> sum(float(b["weights"].sum()) for b in evaluation_batches(np.arange(100), batch_size=2, length=8))
        99.0
    """
    stream = _stream(tokens, batch_size, length)
    targets = len(stream) - 1
    if targets < 1:
        raise ValueError(f"the text is too short to measure: {len(stream)} tokens are there, 2 are needed")
    rows = -(-targets // length)
    count = -(-rows // batch_size)
    total = count * batch_size * length
    padded = np.zeros(total + 1, np.int32)
    padded[: len(stream)] = stream
    weights = (np.arange(total) < targets).astype(np.float32).reshape(count, batch_size, length)
    windows = np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length]
    windows = windows.reshape(count, batch_size, length + 1)
    return [{"tokens": t, "weights": w} for t, w in zip(windows, weights)]


def _stream(tokens: Any, batch_size: int, length: int) -> np.ndarray:
    count("batch_size", batch_size)
    count("length", length)
    array = np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be one row of integers, not {array.dtype}{list(array.shape)}")
    narrow = array.astype(np.int32, copy=False)
    if narrow is not array and not np.array_equal(narrow, array):
        raise ValueError(f"tokens reach {array.max()}, past the int32 that token ids are kept in")
    return narrow


def _this_process() -> tuple[int, int]:
    import jax

    # Asking for the process index starts the devices, after which jax.distributed cannot be initialised.
    if not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()
