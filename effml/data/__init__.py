"""Text in, batches out: corpora split by file, tokenizers, and shuffled windows that resume exactly.

    >>> corpus = load_corpus("stdlib", max_bytes=200_000)
    >>> tokenizer = ByteTokenizer()
    >>> tokens = encode_corpus(corpus, "train", tokenizer)
    >>> batch = next(batches(tokens, batch_size=8, length=64, seed=0))
    >>> batch["tokens"].shape
    (8, 65)

Importing this loads neither grain nor tokenizers; they are loaded by the first call that needs them.
"""

from __future__ import annotations

from effml.data._files import source_files
from effml.data.corpus import SPLITS, Corpus, Document, load_corpus
from effml.data.packing import BatchIterator, WindowBatches, batches, encode_corpus, evaluation_batches
from effml.data.tokenizers import (
    TOKENIZERS,
    BpeTokenizer,
    ByteTokenizer,
    StreamDecoder,
    Tokenizer,
    check_tokens,
    encode_prompt,
    load_tokenizer,
    train_tokenizer,
)

__all__ = [
    "SPLITS",
    "TOKENIZERS",
    "BatchIterator",
    "BpeTokenizer",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "StreamDecoder",
    "Tokenizer",
    "WindowBatches",
    "batches",
    "check_tokens",
    "encode_corpus",
    "encode_prompt",
    "evaluation_batches",
    "load_corpus",
    "load_tokenizer",
    "source_files",
    "train_tokenizer",
]
