"""Hugging Face model folders in and out: config.json, safetensors, tokenizer.json and the chat template.

Read: the Llama family as `transformers` writes it (model types llama, mistral, qwen2, qwen3; SmolLM is
llama), float32, float16 or bfloat16, in one file or sharded. Rotary pairs are split-half there, as they are
here, and matrices are [out, in], so that reading is renaming and transposing. Whatever the configuration asks
for and the transformer does not do is refused by name; nothing is approximated.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from effml._validate import one_of
from effml.nn.hub import _files, _names, _tokenizers
from effml.nn.transformer import RopeScaling, TransformerConfig, unstack_layers

__all__ = [
    "HubModel",
    "config_from_huggingface",
    "config_to_huggingface",
    "read_huggingface",
    "write_huggingface",
]

# What transformers assumes where config.json is silent. Head size: 0 means width / heads.
_DEFAULTS = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "head_dim": None},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": None},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
_FOLDER_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    *_tokenizers.TOKENIZER_FILES,
]


class HubModel(NamedTuple):
    """A model read from files: parameters, configuration, and the tokenizer and chat template, if any."""

    params: dict[str, Any]
    config: TransformerConfig
    tokenizer: Any
    chat_template: str | None


def read_huggingface(folder: str | os.PathLike[str], *, dtype: str = "float32") -> HubModel:
    """Reads a Hugging Face folder.

    Args:
        folder: holds config.json and model.safetensors (or model.safetensors.index.json and its shards), and
            possibly tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.
        dtype: of the parameters and of the computation; float32 holds every stored type exactly.

    Returns:
        (params, config, tokenizer or None, chat template or None).

    Raises:
        ValueError: naming the part of the configuration that is not supported, the tensors that are missing,
            unexpected or of another shape, or the file that is cut short.

    Example:
        >>> params, config, tokenizer, chat_template = read_huggingface("SmolLM2-135M")  # doctest: +SKIP
        >>> read_huggingface("no/such/folder")
        Traceback (most recent call last):
        ...
        ValueError: no/such/folder/config.json does not exist
    """
    one_of("dtype", dtype, ["float32", "bfloat16"])
    folder = Path(folder)
    raw = _files.read_json(folder / "config.json")
    dtypes: dict[str, Any] = {"param_dtype": dtype, "compute_dtype": dtype}
    config = config_from_huggingface(raw, source=str(folder / "config.json"))
    config = dataclasses.replace(config, **dtypes)
    weights = _weights(folder)
    # Buffers of old checkpoints, and the head that a tied model repeats.
    shapes = {
        name: shape for name, shape in weights.shapes.items() if not name.endswith("rotary_emb.inv_freq")
    }
    if config.tied_head:
        shapes.pop("lm_head.weight", None)
    params = _names.read_params(str(folder), config, "huggingface", shapes, weights.read)
    tokenizer, chat_template = _tokenizers.read_tokenizer(folder, raw, config.vocab_size)
    return HubModel(params, config, tokenizer, chat_template)


def _weights(folder: Path) -> _files.SafeTensors:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _files.SafeTensors([single])
    if index.is_file():
        weight_map = _files.read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        # Only the last part of a name is used: an index must not point outside its folder.
        files = {name: folder / Path(str(file)).name for name, file in weight_map.items()}
        return _files.SafeTensors(set(files.values()), files)
    other = sorted(
        path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".h5", ".msgpack"}
    )
    hint = f"; {other[0]} is not read, convert it to safetensors" if other else ""
    raise ValueError(f"{folder} holds no model.safetensors and no model.safetensors.index.json{hint}")


def config_from_huggingface(raw: Mapping[str, Any], *, source: str = "config.json") -> TransformerConfig:
    """Translates the content of a config.json.

    Args:
        raw: the decoded JSON object, as transformers 4 or 5 writes it.
        source: what to call it in errors.

    Returns:
        The configuration, computing in float32.

    Raises:
        ValueError: naming what is missing or not supported.

    Example:
        >>> config_from_huggingface({"model_type": "gpt2"})
        Traceback (most recent call last):
        ...
        ValueError: config.json: model_type='gpt2' is not known (allowed: llama, mistral, qwen2, qwen3)
    """
    try:
        return _config_from_huggingface(raw)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None


def _config_from_huggingface(raw: Mapping[str, Any]) -> TransformerConfig:
    model_type = one_of("model_type", str(raw.get("model_type")), _DEFAULTS)
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    absent = [key for key in needed if raw.get(key) is None]
    if absent:
        raise ValueError(f"missing {', '.join(absent)}")
    values = {**_DEFAULTS[model_type], **raw}
    for key in (*needed, "num_key_value_heads", "max_position_embeddings", "head_dim"):
        if values[key] is not None and (isinstance(values[key], bool) or not isinstance(values[key], int)):
            raise ValueError(f"{key}={values[key]!r} must be an integer")
    _refuse_unsupported(values, model_type)
    rope_base, rope_scaling = _rope_from_huggingface(values)
    width, heads = values["hidden_size"], values["num_attention_heads"]
    attention_bias = bool(values.get("attention_bias", False)) and model_type in {"llama", "qwen3"}
    return TransformerConfig(
        vocab_size=values["vocab_size"],
        width=width,
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        mlp_width=values["intermediate_size"],
        num_kv_heads=values["num_key_value_heads"],
        head_size=values["head_dim"],
        max_length=values["max_position_embeddings"],
        norm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        tied_head=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        attention_output_bias=attention_bias,
        mlp_bias=bool(values.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        initializer_std=float(values.get("initializer_range", 0.02)),
    )


def _refuse_unsupported(values: Mapping[str, Any], model_type: str) -> None:
    if values.get("hidden_act", "silu") not in {"silu", "swish"}:
        raise ValueError(f"hidden_act={values['hidden_act']!r} is not supported (allowed: silu)")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if values.get(key):
            raise ValueError(f"{key}={values[key]} (mixture of experts) is not supported")
    if values.get("quantization_config"):
        method = dict(values["quantization_config"]).get("quant_method", "unknown")
        raise ValueError(
            f"quantization_config (quant_method={method!r}) is not supported; use the unquantised weights"
        )
    window = values.get("sliding_window")
    slides = window is not None and window < values["max_position_embeddings"]
    if model_type.startswith("qwen"):
        layers = values.get("layer_types") or []
        switched_on = values.get("use_sliding_window", False) and (
            values.get("max_window_layers", 28) < values["num_hidden_layers"]
        )
        slides = slides and (switched_on or "sliding_attention" in layers)
    if slides:
        raise ValueError(
            f"sliding_window={window} is not supported (every layer must attend to the whole context)"
        )


def _rope_from_huggingface(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling` (before)."""
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    base = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
    if rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    kind = one_of(
        "rope_type", str(rope.get("rope_type", rope.get("type", "default"))), ["default", "linear", "llama3"]
    )
    if kind == "default":
        return base, None
    needed = ["factor"] if kind == "linear" else ["factor", "low_freq_factor", "high_freq_factor"]
    absent = [key for key in needed if key not in rope]
    if absent:
        raise ValueError(f"rope_type={kind!r} misses {', '.join(absent)}")
    if kind == "linear":
        return base, RopeScaling(kind="linear", factor=float(rope["factor"]))
    return base, RopeScaling(
        kind="llama3",
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_max_length=int(
            rope.get("original_max_position_embeddings", values["max_position_embeddings"])
        ),
    )


def config_to_huggingface(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a model: qwen3 with QK-norm, qwen2 with biases on q, k, v alone, else llama.

    Args:
        config: the model.

    Returns:
        The JSON object as transformers 5 writes it, with `rope_theta` and `rope_scaling` for older readers.

    Raises:
        ValueError: naming every option that none of the three model types has a place for.

    Example:
        >>> config = TransformerConfig(8, 4, num_layers=1, num_heads=2, mlp_width=6, norm="layer")
        >>> config_to_huggingface(config)
        Traceback (most recent call last):
        ...
        ValueError: Hugging Face's llama, qwen2 and qwen3 have no place for norm='layer'
    """
    kind = "qwen3" if config.qk_norm else "llama"
    if config.qkv_bias and not config.attention_output_bias and not config.qk_norm:
        kind = "qwen2"
    required = {
        "norm": "rms",
        "positions": "rope",
        "mlp": "swiglu",
        "head_bias": False,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
    }
    homeless = [
        f"{key}={getattr(config, key)!r}" for key, value in required.items() if getattr(config, key) != value
    ]
    if config.attention_scale is not None and not np.isclose(
        config.attention_scale, config.head_dim**-0.5, rtol=1e-6
    ):
        homeless.append(f"attention_scale={config.attention_scale!r}")
    if kind != "qwen2" and config.qkv_bias != config.attention_output_bias:
        homeless.append(
            f"qkv_bias={config.qkv_bias} with attention_output_bias={config.attention_output_bias} in {kind}"
        )
    if config.mlp_bias and kind != "llama":
        homeless.append(f"mlp_bias=True in {kind}")
    if homeless:
        raise ValueError(f"Hugging Face's llama, qwen2 and qwen3 have no place for {', '.join(homeless)}")
    rope: dict[str, Any] = {"rope_theta": config.rope_base, "rope_type": "default"}
    if config.rope_scaling is not None:
        rope |= {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
        if config.rope_scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": config.rope_scaling.low_frequency_factor,
                "high_freq_factor": config.rope_scaling.high_frequency_factor,
                "original_max_position_embeddings": config.rope_scaling.original_max_length,
            }
    content: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind] + "ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": rope,
        "rope_theta": config.rope_base,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "tie_word_embeddings": config.tied_head,
        "initializer_range": config.initializer_std,
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind != "qwen2":
        content["attention_bias"] = config.qkv_bias
    if kind == "llama":
        content["mlp_bias"] = config.mlp_bias
    else:
        content |= {"use_sliding_window": False, "sliding_window": None}
    return content


def write_huggingface(
    folder: str | os.PathLike[str],
    params: Mapping[str, Any],
    config: TransformerConfig,
    tokenizer: Any = None,
    chat_template: str | None = None,
) -> None:
    """Writes a folder that `transformers` loads: config.json, model.safetensors and the tokenizer's files.

    The folder appears under its name when it is whole. Interleaved rotary pairs are reordered to the
    split-half pairs that Hugging Face uses (the same function, up to rounding).

    Args:
        folder: a new or empty folder, or one written by this function before.
        params: parameters of `config`, layers as a list or stacked.
        config: the model.
        tokenizer: a `ByteTokenizer` or `BpeTokenizer`, or None.
        chat_template: jinja text; None takes the tokenizer's own, if it has one.

    Raises:
        ValueError: naming the options that Hugging Face has no place for, parameters that do not fit
            `config`, or a folder with other files in it.

    Example:
        >>> import tempfile
        >>> from effml.nn.transformer import init_params
        >>> config = TransformerConfig(vocab_size=8, width=4, num_layers=1, num_heads=2, mlp_width=6)
        >>> folder = Path(tempfile.mkdtemp()) / "tiny"
        >>> write_huggingface(folder, init_params(jax.random.key(0), config), config)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'generation_config.json', 'model.safetensors']
        >>> read_huggingface(folder).config.mlp_width
        6
    """
    content = config_to_huggingface(config)
    tree = unstack_layers(params)
    leaves = {_names.path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    _names.check_tensors(
        "params", _names.parameter_shapes(config), {path: np.shape(leaf) for path, leaf in leaves.items()}
    )
    tensors = {}
    for path, name in _names.file_names(leaves, "huggingface").items():
        array = np.asarray(leaves[path])
        if config.rope_layout == "interleaved":
            array = _split_pairs(path, array, config.head_dim)
        tensors[name] = array.T if path.endswith(".kernel") else array
    dtypes = {str(array.dtype) for array in tensors.values()}
    if len(dtypes) == 1:
        content["dtype"] = content["torch_dtype"] = dtypes.pop()
    stop_ids = (
        [] if tokenizer is None else [int(index) for index in tokenizer.stop_ids] or [int(tokenizer.end_id)]
    )
    if stop_ids:
        content["eos_token_id"] = stop_ids[0] if len(stop_ids) == 1 else stop_ids
    with _files.new_folder(folder, _FOLDER_FILES) as path:
        _files.write_json(path / "config.json", content)
        _files.write_json(path / "generation_config.json", {"eos_token_id": content["eos_token_id"]})
        _files.write_safetensors(path / "model.safetensors", tensors)
        if tokenizer is not None:
            _tokenizers.write_tokenizer(path, tokenizer, chat_template)


def _split_pairs(path: str, array: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the head axis from pairs (0,1), (2,3), … to pairs (0,h/2), (1,h/2+1), …; other arrays pass."""
    if not any(part in path for part in ("attention.query", "attention.key")):
        return array
    heads = array.reshape(*array.shape[:-1], -1, head_dim // 2, 2)
    return np.swapaxes(heads, -1, -2).reshape(array.shape)
