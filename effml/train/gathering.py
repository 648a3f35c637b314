r"""Weights that are split over devices, made whole where they are used and nowhere else.

With `fsdp` each device keeps a slice of every matrix. A product needs the whole one, and its gradient is wanted in
slices again. Constraining the weight alone is not enough: the transpose of "replicate this" is "replicate its
gradient too", which moves and keeps whole gradients. So the gather has a gradient of its own,

$$\mathrm{gather}(w) = \text{whole}(\text{narrow}(w)), \qquad
  \overline{w} = \text{sliced}(\overline{\mathrm{gather}(w)})$$

which is an all-gather in the compute dtype forward and a reduce-scatter backward. Inside a scan over layers with
rematerialisation, a device then holds one whole layer at a time.

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054 (stage 3).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from effml.train import sharding

__all__ = ["fsdp_loss", "gather", "gathered_linear"]


def gather(array: Array, spec: PartitionSpec, mesh: Mesh, dtype: Any = None) -> Array:
    """Inside jit: the whole of an array that `spec` splits over `fsdp`; its gradient is split as the array is.

    Args:
        array: a parameter.
        spec: how it is split; axes other than `fsdp` stay split.
        mesh: a mesh of `make_mesh`.
        dtype: floating arrays are cast to it before they travel; None keeps their own.

    Returns:
        The array without the `fsdp` split, in `dtype`.

    Example:
        >>> mesh = sharding.make_mesh({"fsdp": 1}, devices=jax.devices()[:1])
        >>> gather(jnp.ones(2), PartitionSpec("fsdp"), mesh, "bfloat16").dtype.name
        'bfloat16'
    """
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        dtype = array.dtype
    return _gather(array, spec, mesh, jnp.dtype(dtype), jnp.dtype(array.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(array: Array, spec: PartitionSpec, mesh: Mesh, narrow: Any, own: Any) -> Array:
    del own
    # Sliced after the cast as well: else the partitioner may gather first, in the wide type, and cast then.
    sliced = _place(array.astype(narrow), spec, mesh)
    return _place(sliced, PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec)), mesh)


def _gather_forward(array: Array, spec: PartitionSpec, mesh: Mesh, narrow: Any, own: Any) -> Any:
    return _gather(array, spec, mesh, narrow, own), None


def _gather_backward(
    spec: PartitionSpec, mesh: Mesh, narrow: Any, own: Any, saved: None, cotangent: Array
) -> tuple[Array]:
    del narrow, saved
    return (_place(cotangent, spec, mesh).astype(own),)


_gather.defvjp(_gather_forward, _gather_backward)


def _place(array: Array, spec: PartitionSpec, mesh: Mesh) -> Array:
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def gathered_linear(
    linear: Callable[[Array, Any, str], Array], mesh: Mesh
) -> Callable[[Array, Any, str], Array]:
    """`linear` for the seam of `effml.nn.transformer.forward`, with the kernels of one layer gathered first.

    The rows of its input stay split over `data` and `fsdp`. The head is left to `fsdp_loss`.

    Args:
        linear: `(x, params, name) -> y`, such as `effml.nn.transformer.dense_linear`.
        mesh: a mesh of `make_mesh`.

    Returns:
        A function of the same form.

    Example:
        >>> from effml.nn.transformer import dense_linear
        >>> mesh = sharding.make_mesh({"fsdp": 1}, devices=jax.devices()[:1])
        >>> gathered_linear(dense_linear, mesh)(jnp.ones((1, 2)), {"kernel": jnp.ones((2, 3))}, "mlp.up").shape
        (1, 3)
    """

    def wrapped(x: Array, params: Any, name: str) -> Array:
        x = _place(x, sharding.batch_sharding(mesh).spec, mesh)
        if name == "head":
            return linear(x, params, name)
        # Named as in the parameters, so that the tensor rules of `param_specs` find the kernel.
        tree = functools.reduce(lambda inner, key: {key: inner}, reversed(name.split(".")), params)
        return linear(x, _gather_tree(tree, params, mesh, x.dtype), name)

    return wrapped


def fsdp_loss(
    loss_fn: Callable[..., Any], mesh: Mesh, *, linear: Callable[[Array, Any, str], Array], dtype: Any = None
) -> Callable[[PyTree, PyTree], Any]:
    """The loss of a model with a `linear` seam, with every weight gathered where it is used.

    What lies outside `layers` (embedding, head) is gathered once, each layer's kernels at each use.

    Args:
        loss_fn: `loss_fn(params, batch, linear=...)`, such as a partial of `next_token_loss`.
        mesh: a mesh of `make_mesh`.
        linear: the product to use, such as `effml.nn.transformer.dense_linear`.
        dtype: the compute dtype, in which embedding and head travel; None is their own.

    Returns:
        `loss(params, batch)`, for `make_step`, with the keys that `loss_fn` takes. It computes what `loss_fn` does.

    Example:
        >>> from effml.nn.transformer import TransformerConfig, dense_linear, init_params, next_token_loss
        >>> config = TransformerConfig(vocab_size=16, width=8, num_layers=1, num_heads=2, mlp_width=16)
        >>> mesh = sharding.make_mesh({"fsdp": 1}, devices=jax.devices()[:1])
        >>> loss = fsdp_loss(functools.partial(next_token_loss, config=config), mesh, linear=dense_linear)
        >>> value, _ = jax.jit(loss)(init_params(jax.random.key(0), config), {"tokens": jnp.ones((1, 3), int)})
        >>> value.shape
        ()
    """
    product = gathered_linear(linear, mesh)

    def loss(params: Mapping[str, Any], batch: PyTree, **keys: Any) -> Any:
        outside = {name: tree for name, tree in params.items() if name != "layers"}
        whole = _gather_tree(outside, outside, mesh, dtype)
        if "layers" in params:
            whole["layers"] = params["layers"]
        return loss_fn(whole, batch, linear=product, **keys)

    # `make_step` looks there for the keys that a loss takes.
    loss.__signature__ = inspect.signature(loss_fn)  # pyright: ignore[reportFunctionMemberAccess]
    return loss


def _gather_tree(named: PyTree, tree: PyTree, mesh: Mesh, dtype: Any) -> Any:
    """`tree` gathered; its specs are those of `named`, the same leaves under their full names."""
    specs = jax.tree.leaves(
        sharding.param_specs(named, mesh), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        [gather(leaf, spec, mesh, dtype) if "fsdp" in spec else leaf for leaf, spec in zip(leaves, specs)]
    )
