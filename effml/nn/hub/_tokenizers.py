"""Tokenizers of foreign models: tokenizer.json and its companions, and those described in GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effml._validate import one_of
from effml.nn.hub import _files

__all__ = ["TOKENIZER_FILES", "read_tokenizer", "tokenizer_from_gguf", "write_tokenizer"]

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
]
_END_NAMES = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"]

# Splits into pieces that are merged separately, as llama.cpp names them (None: GPT-2's own, in ByteLevel).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": None,
    "smollm": "digits",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "deepseek-r1-qwen": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
}
_CONTROL, _USER_DEFINED = 3, 4


def read_tokenizer(folder: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[Any, str | None]:
    """The tokenizer (None without tokenizer.json) and chat template of a Hugging Face folder.

    Args:
        folder: the folder.
        config: content of its config.json, for the end-of-text id.
        vocab_size: ids the model knows; a tokenizer with more is refused.

    Raises:
        ValueError: if a file is damaged, or nothing names the token that ends a text.
    """
    settings = _optional_json(folder / "tokenizer_config.json")
    chat_template = _chat_template(folder, settings)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None, chat_template
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a whole tokenizer ({error})") from None
    largest = max(backend.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise ValueError(
            f"{path} has the id {largest}, the model knows {vocab_size} ids (0 to {vocab_size - 1})"
        )
    stops: list[int] = []
    for source in (_optional_json(folder / "generation_config.json"), config):
        ids = source.get("eos_token_id")
        stops += [ids] if isinstance(ids, int) else list(ids or [])
    named = settings.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    for name in [named] if named else [] if stops else _END_NAMES:
        index = backend.token_to_id(name)
        stops += [] if index is None else [index]
    return _bpe(backend, stops, chat_template, str(path)), chat_template


def _bpe(backend: Any, stops: list[int], chat_template: str | None, source: str) -> Any:
    from effml.data import BpeTokenizer

    if not stops:
        raise ValueError(
            f"{source} names no token that ends a text; put eos_token_id into generation_config.json"
        )
    unique = list(dict.fromkeys(stops))
    return BpeTokenizer.from_tokenizer(
        backend, unique[0], chat_template=chat_template, stop_ids=tuple(unique)
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return _files.read_json(path) if path.is_file() else {}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or _optional_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template


def tokenizer_from_gguf(source: str, metadata: Mapping[str, Any], vocab_size: int) -> tuple[Any, str | None]:
    """The byte-level BPE tokenizer (None if the file has none) and chat template in GGUF metadata.

    Args:
        source: what to call the file in errors.
        metadata: `GgufFile.metadata`.
        vocab_size: ids the model knows.

    Raises:
        ValueError: naming a tokenizer model or pre-tokenizer that is not supported, or what is missing.
    """
    chat_template = metadata.get("tokenizer.chat_template")
    if not isinstance(chat_template, str | None):
        raise ValueError(f"{source}: tokenizer.chat_template must be a text")
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return None, chat_template
    try:
        one_of("tokenizer.ggml.model", str(model), ["gpt2"])
        pre = one_of("tokenizer.ggml.pre", str(metadata.get("tokenizer.ggml.pre", "gpt-2")), _PRE_TOKENIZERS)
        backend = _byte_level_bpe(metadata, pre, vocab_size)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    stops = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    if not all(isinstance(index, int) and 0 <= index < vocab_size for index in stops):
        raise ValueError(
            f"{source}: the ids {stops} that end a text are not all between 0 and {vocab_size - 1}"
        )
    return _bpe(backend, stops, chat_template, source), chat_template


def _byte_level_bpe(metadata: Mapping[str, Any], pre: str, vocab_size: int) -> Any:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens or []))
    if not isinstance(tokens, list) or not isinstance(merges, list) or len(kinds) != len(tokens):
        raise ValueError(
            "tokenizer.ggml.tokens, merges and token_type must be lists of one length each token"
        )
    if len(set(tokens)) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens holds the same token twice")
    if len(tokens) > vocab_size:
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens)} entries, the model knows {vocab_size} ids")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    bad = next((pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()), None)
    if bad is not None:
        raise ValueError(f"tokenizer.ggml.merges has {' '.join(bad)!r}, which tokenizer.ggml.tokens does not")
    # Llama 3 looks a whole piece up before merging; the others merge always.
    llama3 = _PRE_TOKENIZERS[pre] == _LLAMA3
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=llama3))
    pattern = _PRE_TOKENIZERS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, "digits"))
    steps: list[Any] = [byte_level]
    if pattern == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif pattern is not None:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if "qwen" in pre:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    own = [token for token, kind in zip(tokens, kinds) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in own])
    # llama.cpp begins with the first token by default for Llama 3 alone among these.
    if metadata.get("tokenizer.ggml.add_bos_token", llama3) and "tokenizer.ggml.bos_token_id" in metadata:
        begin = metadata["tokenizer.ggml.bos_token_id"]
        if not isinstance(begin, int) or not 0 <= begin < len(tokens):
            raise ValueError(f"tokenizer.ggml.bos_token_id={begin!r} is not between 0 and {len(tokens) - 1}")
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[begin], "$A"],
            special_tokens=[(tokens[begin], begin)],
        )
    return backend


def write_tokenizer(folder: Path, tokenizer: Any, chat_template: str | None) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja.

    Raises:
        ValueError: if the tokenizer is of a kind that has no tokenizer.json.
    """
    backend = _backend(tokenizer)
    backend.save(str(folder / "tokenizer.json"))
    end = backend.id_to_token(int(tokenizer.end_id))
    _files.write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "clean_up_tokenization_spaces": False,
        },
    )
    template = chat_template or getattr(tokenizer, "chat_template", None)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _backend(tokenizer: Any) -> Any:
    from effml.data import BpeTokenizer, ByteTokenizer

    if isinstance(tokenizer, ByteTokenizer):
        return _byte_backend(int(tokenizer.end_id))
    if isinstance(tokenizer, BpeTokenizer):
        return tokenizer.tokenizer
    raise ValueError(
        f"tokenizer={type(tokenizer).__name__} has no tokenizer.json; ByteTokenizer and BpeTokenizer do"
    )


def _byte_backend(end_id: int) -> Any:
    """The byte tokenizer as byte-level BPE without merges: id = byte, and a name for the one that ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }
    characters[end_id] = (
        "<|end|>"  # its stand-in is a letter, and special tokens are found in the text itself
    )
    backend = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(characters[end_id], normalized=False, special=True)])
    return backend
