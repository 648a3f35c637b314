"""Rotations and gains multiplied into the kernels beside them: exact, and free at run time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml import linalg
from effml.nn import transformer
from effml.nn.transformer import TransformerConfig
from effml.quantize.respinquant._rotations import ModelSpec, RotationSet

__all__ = ["fold_norms", "fuse_rotations", "untie"]


def untie(params: Mapping[str, Any], config: TransformerConfig) -> tuple[dict[str, Any], TransformerConfig]:
    """A model with a head of its own: the table starts the stream in one basis, the head reads it in another.

    Args:
        params: of the model.
        config: of the model.

    Returns:
        Parameters with `"head"`, and the config that says so; unchanged where the head was separate.

    Example:
        >>> import jax
        >>> config = TransformerConfig(256, 32, 1, 4, 64)
        >>> params, config = untie(transformer.init_params(jax.random.key(0), config), config)
        >>> params["head"]["kernel"].shape, config.tied_head
        ((32, 256), False)
    """
    if not config.tied_head:
        return dict(params), config
    head = {"kernel": params["embedding"]["table"].T, **params.get("head", {})}
    return {**params, "head": head}, dataclasses.replace(config, tied_head=False)


def fold_norms(params: Mapping[str, Any], spec: ModelSpec, *, dtype: Any = np.float32) -> dict[str, Any]:
    """The same function with every gain multiplied into the kernels that read it, and set to 1.

    Without gains, rms(x R) = rms(x) R. The mean of the embedding stays: root mean square norms see it.

    Args:
        params: of the model, layers scanned or not, the head separate.
        spec: of the model.
        dtype: of the result; products are taken in float64.

    Returns:
        Parameters of the same structure, as NumPy arrays.

    Raises:
        ValueError: a tied head (see `untie`), a norm with a bias, or a leaf that is missing, naming its path.

    Example:
        >>> import jax
        >>> from effml.quantize.respinquant import transformer_spec
        >>> config = TransformerConfig(256, 32, 1, 4, 64, tied_head=False)
        >>> folded = fold_norms(transformer.init_params(jax.random.key(0), config), transformer_spec(config))
        >>> float(folded["final_norm"]["scale"].min())
        1.0
    """
    _check(params, spec)
    stacked = transformer.is_scanned(params)
    layers = params["layers"]
    folded = [_cast(_folded_layer(layer, spec), dtype) for layer in ([layers] if stacked else layers)]
    return _cast(_folded_head({**params, "layers": folded[0] if stacked else folded}, spec), dtype)


def _folded_head(params: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    gain = _wide(_get(params, spec.final_norm))
    out = _put(params, spec.final_norm, np.ones_like(gain))
    return _put(out, (*spec.head, "kernel"), gain[:, None] * _wide(_get(params, spec.head)["kernel"]))


def _folded_layer(layer: Mapping[str, Any], spec: ModelSpec) -> Mapping[str, Any]:
    readers = {
        spec.attention_norm: (*spec.attention_readers, spec.value),
        spec.mlp_norm: spec.mlp_readers,
    }
    for norm, kernels in readers.items():
        gain = _wide(_get(layer, norm))
        layer = _put(layer, norm, np.ones_like(gain))
        for path in kernels:
            kernel = gain[..., :, None] * _wide(_get(layer, path)["kernel"])
            layer = _put(layer, (*path, "kernel"), kernel)
    return layer


def fuse_rotations(
    params: Mapping[str, Any],
    rotations: RotationSet,
    spec: ModelSpec,
    *,
    hadamard: bool = True,
    dtype: Any = np.float32,
) -> dict[str, Any]:
    r"""The model in the rotated bases, computed in float64 on the host.

    | leaf | becomes |
    |---|---|
    | tables | $E A_0$ |
    | query, key | $A_i^T K$ |
    | value | $A_i^T K\,\mathrm{blockdiag}(V_i)$ |
    | attention output | $\mathrm{blockdiag}(V_i)^T K M_i$ |
    | gate, up | $M_i^T K$ |
    | down | $H^T K A_{i+1}$ |
    | head | $A_L^T K$ |

    Biases turn with the outputs. The result computes what the model did if every skip is multiplied by its
    transition (`transitions`), and what the down projection reads by H (`effml.linalg.fht`).

    Args:
        params: folded (`fold_norms`), layers scanned or not.
        rotations: of the model.
        spec: of the model.
        hadamard: whether H is there; its blocks have the size `effml.linalg.hadamard_order(mlp_width)`.
        dtype: of the result, rounded once at the end.

    Returns:
        Parameters with a list of layers, as NumPy arrays.

    Raises:
        ValueError: gains that are not 1, rotations of other shapes, or a leaf that is missing.

    Example:
        >>> import jax
        >>> from effml.quantize.respinquant import init_rotations, transformer_spec
        >>> config = TransformerConfig(256, 32, 1, 4, 64, tied_head=False)
        >>> spec, params = transformer_spec(config), transformer.init_params(jax.random.key(0), config)
        >>> fused = fuse_rotations(fold_norms(params, spec), init_rotations(jax.random.key(1), spec), spec)
        >>> fused["layers"][0]["mlp"]["down"]["kernel"].shape
        (64, 32)
    """
    _check(params, spec)
    params = transformer.unstack_layers(params)
    for path, tree in [(spec.final_norm, params)] + [
        (norm, layer) for layer in params["layers"] for norm in (spec.attention_norm, spec.mlp_norm)
    ]:
        if not np.all(np.asarray(_get(tree, path)) == 1):
            raise ValueError(
                f"{'.'.join(path)} is not 1: a rotation commutes with no gain; call fold_norms first"
            )
    return fold_and_fuse(params, rotations, spec, hadamard=hadamard, dtype=dtype)


def fold_and_fuse(
    params: Mapping[str, Any], rotations: RotationSet, spec: ModelSpec, *, hadamard: bool, dtype: Any
) -> dict[str, Any]:
    """`fold_norms` and `fuse_rotations` in one pass: one layer at a time is wide, and no folded copy is kept."""
    _check(params, spec)
    _check_rotations(rotations, spec)
    order = linalg.hadamard_order(spec.mlp_width)
    out = _folded_head(transformer.unstack_layers(params), spec)
    first, last = _wide(rotations.a[0]), _wide(rotations.a[-1])
    for path in spec.tables:
        out = _put(out, path, np.asarray(_wide(_get(out, path)) @ first, dtype))
    layers = []
    for index, layer in enumerate(out["layers"]):
        layer = _folded_layer(layer, spec)
        a, m, after, v = (
            _wide(one)
            for one in (rotations.a[index], rotations.m[index], rotations.a[index + 1], rotations.v[index])
        )

        def per_head(x: np.ndarray, v: np.ndarray = v) -> np.ndarray:
            return (x.reshape(*x.shape[:-1], -1, spec.head_dim) @ v).reshape(x.shape)

        for path in spec.attention_readers:
            layer = _map(layer, path, lambda k, a=a: a.T @ k)
        layer = _map(layer, spec.value, lambda k, a=a, f=per_head: f(a.T @ k), per_head)
        layer = _map(
            layer, spec.attention_writer, lambda k, m=m, f=per_head: f(k.T).T @ m, lambda b, m=m: b @ m
        )
        for path in spec.mlp_readers:
            layer = _map(layer, path, lambda k, m=m: m.T @ k)
        layer = _map(
            layer,
            spec.mlp_writer,
            lambda k, after=after: (_host_fht(k, order) if hadamard else k) @ after,
            lambda b, after=after: b @ after,
        )
        layers.append(_cast(layer, dtype))
    return _cast(_map({**out, "layers": layers}, spec.head, lambda k: last.T @ k), dtype)


def _map(
    tree: Mapping[str, Any], path: tuple[str, ...], kernel: Callable, bias: Callable | None = None
) -> dict[str, Any]:
    old = _get(tree, path)
    new = {**old, "kernel": kernel(_wide(old["kernel"]))}
    if bias is not None and "bias" in old:
        new["bias"] = bias(_wide(old["bias"]))
    return _put(tree, path, new)


def _host_fht(kernel: np.ndarray, order: int) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(linalg.fht(jnp.asarray(kernel, jnp.float64), axis=0, order=order))


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), tree)


def _get(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = tree
    for key in path:
        node = node[key]
    return node


def _put(tree: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return {**tree, path[0]: value}
    return {**tree, path[0]: _put(tree[path[0]], path[1:], value)}


def _check(params: Mapping[str, Any], spec: ModelSpec) -> None:
    if spec.head[0] not in params or "kernel" not in params[spec.head[0]]:
        raise ValueError(
            "the head is tied to the embedding, and one table cannot be in two bases; call untie first"
        )
    layers = params["layers"]
    for layer in [layers] if transformer.is_scanned(params) else layers:
        for norm in (spec.attention_norm, spec.mlp_norm):
            if "bias" in _get(layer, norm[:-1]):
                raise ValueError(
                    f"{'.'.join(norm[:-1])}.bias: a norm with a bias does not commute with rotations"
                )
        for path in (
            *spec.attention_readers,
            spec.value,
            spec.attention_writer,
            *spec.mlp_readers,
            spec.mlp_writer,
        ):
            try:
                kernel = _get(layer, path)["kernel"]
            except (KeyError, TypeError):
                raise ValueError(
                    f"layers have no {'.'.join(path)}.kernel (joined or packed already?)"
                ) from None
            if not jnp.issubdtype(kernel.dtype, jnp.floating):
                raise ValueError(
                    f"{'.'.join(path)}.kernel is {kernel.dtype}; rotations need floating-point kernels"
                )


def _check_rotations(rotations: RotationSet, spec: ModelSpec) -> None:
    d, n, h = spec.width, spec.num_layers, spec.head_dim
    for name, wanted in (("a", (n + 1, d, d)), ("m", (n, d, d)), ("v", (n, h, h))):
        shape = tuple(np.shape(getattr(rotations, name)))
        if shape != wanted:
            raise ValueError(f"rotations.{name} of shape {shape} must have shape {wanted}")
