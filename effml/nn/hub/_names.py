"""What parameters are called in Hugging Face and GGUF files, and the check that a file holds just those."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from effml.nn.transformer import TransformerConfig, init_params
from effml.trees import path_name

__all__ = ["Style", "check_tensors", "file_names", "parameter_shapes", "read_params", "unflatten"]

Style = Literal["huggingface", "gguf"]

# Parameter path (below a layer) -> name below the layer in the file. Biases follow from the weights.
_LAYER = {
    "attention_norm.scale": ("input_layernorm.weight", "attn_norm.weight"),
    "attention.query.kernel": ("self_attn.q_proj.weight", "attn_q.weight"),
    "attention.key.kernel": ("self_attn.k_proj.weight", "attn_k.weight"),
    "attention.value.kernel": ("self_attn.v_proj.weight", "attn_v.weight"),
    "attention.output.kernel": ("self_attn.o_proj.weight", "attn_output.weight"),
    "attention.query_norm.scale": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "attention.key_norm.scale": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm.scale": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "mlp.gate.kernel": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "mlp.up.kernel": ("mlp.up_proj.weight", "ffn_up.weight"),
    "mlp.down.kernel": ("mlp.down_proj.weight", "ffn_down.weight"),
}
_TOP = {
    "embedding.table": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm.scale": ("model.norm.weight", "output_norm.weight"),
    "head.kernel": ("lm_head.weight", "output.weight"),
}
_LAYER_PREFIX = {"huggingface": "model.layers.", "gguf": "blk."}


def _file_name(path: str, style: Style) -> str | None:
    column = 0 if style == "huggingface" else 1
    bias = path.endswith(".bias")
    key = path.removesuffix(".bias") + ".kernel" if bias else path
    layer = re.match(r"layers\.(\d+)\.(.+)", key)
    entry = _LAYER.get(layer[2]) if layer else _TOP.get(key)
    if entry is None:
        return None
    name = entry[column] if layer is None else f"{_LAYER_PREFIX[style]}{layer[1]}.{entry[column]}"
    return name.removesuffix(".weight") + ".bias" if bias else name


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: TransformerConfig, *, scanned: bool = False) -> Mapping[str, tuple[int, ...]]:
    """Shape of every parameter by dotted path, layers as a list or (scanned) stacked.

    Example:
        >>> config = TransformerConfig(vocab_size=8, width=4, num_layers=1, num_heads=2, mlp_width=6)
        >>> parameter_shapes(config)["layers.0.mlp.down.kernel"]
        (6, 4)
    """
    tree = jax.eval_shape(lambda key: init_params(key, config, scanned=scanned), jax.random.key(0))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return MappingProxyType({path_name(path): leaf.shape for path, leaf in leaves})


def file_names(paths: Iterable[str], style: Style) -> dict[str, str]:
    """Name in the file of each parameter path.

    Raises:
        ValueError: naming the parameters that files of this style have no place for.

    Example:
        >>> file_names(["layers.3.attention.key.bias"], "gguf")
        {'layers.3.attention.key.bias': 'blk.3.attn_k.bias'}
    """
    names = {path: _file_name(path, style) for path in paths}
    homeless = [path for path, name in names.items() if name is None]
    if homeless:
        raise ValueError(f"{style} files have no place for the parameters {_some(homeless)}")
    return {path: name for path, name in names.items() if name is not None}


def check_tensors(
    source: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises `ValueError` unless `found` has exactly the names and shapes that are `expected`.

    Example:
        >>> check_tensors("a.safetensors", {"scale": (4,)}, {"scale": (5,)})
        Traceback (most recent call last):
        ...
        ValueError: a.safetensors: wrong shapes: scale is (5,), should be (4,)
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    problems = []
    if missing:
        problems.append(f"missing tensors: {_some(missing)}")
    if unexpected:
        problems.append(f"unexpected tensors: {_some(unexpected)}")
    if not missing and not unexpected:
        wrong = [
            f"{name} is {found[name]}, should be {shape}"
            for name, shape in expected.items()
            if tuple(found[name]) != tuple(shape)
        ]
        if wrong:
            problems.append(f"wrong shapes: {_some(wrong)}")
    if problems:
        raise ValueError(f"{source}: {'; '.join(problems)}")


def read_params(
    source: str,
    config: TransformerConfig,
    style: Style,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    convert: Callable[[str, np.ndarray], np.ndarray] = lambda path, array: array,
) -> dict[str, Any]:
    """Builds the parameter tree of `config` from a file's tensors, one at a time.

    Args:
        source: what to call the file in errors.
        config: the model; its `param_dtype` is the type of the result.
        style: whose names the file uses. Matrices are stored [out, in] and become kernels [in, out].
        shapes: shape of every tensor in the file.
        read: the tensor of a name.
        convert: applied to each (parameter path, stored tensor).

    Returns:
        Parameters as `effml.nn.transformer.init_params` lays them out, layers as a list.

    Raises:
        ValueError: naming missing and unexpected tensors and wrong shapes.
    """
    # A header that lies about the depth must not make us lay out a billion layers first.
    prefix = re.escape(_LAYER_PREFIX[style])
    depth = len({match[1] for name in shapes if (match := re.match(rf"{prefix}(\d+)\.", name))})
    if depth != config.num_layers:
        raise ValueError(
            f"{source}: the configuration says {config.num_layers} layers, the weights hold {depth}"
        )
    parameters = parameter_shapes(config)
    names = file_names(parameters, style)
    stored = {
        names[path]: shape[::-1] if path.endswith(".kernel") else shape for path, shape in parameters.items()
    }
    check_tensors(source, stored, shapes)
    leaves = {}
    for path, name in names.items():
        array = convert(path, read(name))
        leaves[path] = jnp.asarray(array.T if path.endswith(".kernel") else array, dtype=config.param_dtype)
    return unflatten(leaves)


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nests dotted paths again; a level whose keys are 0, 1, … becomes a list.

    Raises:
        ValueError: if one path is the beginning of another.

    Example:
        >>> unflatten({"layers.0.scale": 1, "layers.1.scale": 2, "bias": 3})
        {'layers': [{'scale': 1}, {'scale': 2}], 'bias': 3}
    """
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"the tensor {path!r} lies below another tensor")
        if last in node:
            raise ValueError(f"the tensor {path!r} has other tensors below it")
        node[last] = leaf

    def lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        children = {key: lists(child) for key, child in node.items()}
        if children and set(children) == {str(index) for index in range(len(children))}:
            return [children[str(index)] for index in range(len(children))]
        return children

    return lists(root)


def _some(items: list[str], limit: int = 6) -> str:
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
