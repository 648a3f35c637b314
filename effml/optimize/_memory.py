"""How many bytes an optimizer keeps beside the parameters, without allocating any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from effml import trees

__all__ = ["memory_report", "memory_view"]

CONVENTION = "parameters + optimizer state; gradients and activations are not counted"


def memory_report(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    *,
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
) -> dict[str, Any]:
    """Bytes of the parameters and of the optimizer's state, and their sum as a share of Adam's.

        ratio_vs_adam = (param_bytes + state_bytes) / (param_bytes + Adam's state_bytes)

    Only shapes are computed (`jax.eval_shape`), so a 7B model takes milliseconds and no memory. Arrays alone
    are
    counted: placeholders of masked leaves are not. Adam's state has the dtype of the parameters.

    Args:
        optimizer: any optax transformation.
        params: parameters or a tree of `jax.ShapeDtypeStruct`.
        labels: roles of the parameters for the table, a tree like `params` or a function that makes one from
            their shapes; None = `effml.trees.parameter_roles(params)`.

    Returns:
        `param_bytes`, `state_bytes`, `total_bytes`, `adam_bytes` (parameters + state), `ratio_vs_adam`,
        `convention`, and `roles`: one row per role with `role`, `leaves`, `elements`, `param_bytes`,
        `state_bytes`. State that belongs to no single parameter (step counters, keys, projections under
        another name) is in the row `shared`.

    Raises:
        ValueError: `params` holds no arrays, or `labels` is a tree of another structure.
        TypeError: `optimizer` is not an optax transformation.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> report = memory_report(optax.sgd(0.1, momentum=0.9), {"head": {"kernel": jnp.zeros((4, 8))}})
        >>> report["param_bytes"], report["state_bytes"]
        (128, 128)
    """
    if not callable(getattr(optimizer, "init", None)):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not an optax.GradientTransformation; "
            "pass the object itself, such as optax.adamw(1e-3)"
        )
    shapes = jax.eval_shape(lambda tree: tree, params)
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    if not leaves:
        raise ValueError("params holds no arrays")
    if labels is None:
        labels = trees.parameter_roles(shapes)
    elif callable(labels):
        labels = labels(shapes)
    if jax.tree.structure(labels) != jax.tree.structure(shapes):
        raise ValueError(
            f"labels is a tree of another structure than params ({len(jax.tree.leaves(labels))} and {len(leaves)} "
            "leaves); give one role for each parameter, in the same containers"
        )
    roles = jax.tree.leaves(labels)
    state = jax.eval_shape(optimizer.init, shapes)
    adam = jax.eval_shape(optax.adam(1.0).init, shapes)

    rows = {
        role: {"role": role, "leaves": 0, "elements": 0, "param_bytes": 0, "state_bytes": 0}
        for role in (*dict.fromkeys(roles), "shared")
    }
    role_of = {}
    for (path, leaf), role in zip(leaves, roles):
        role_of[tuple(path)] = role
        rows[role]["leaves"] += 1
        rows[role]["elements"] += leaf.size
        rows[role]["param_bytes"] += trees.byte_count(leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        rows[_owner(tuple(path), role_of)]["state_bytes"] += trees.byte_count(leaf)

    param_bytes, state_bytes = trees.byte_count(shapes), trees.byte_count(state)
    adam_bytes = param_bytes + trees.byte_count(adam)
    return {
        "param_bytes": param_bytes,
        "state_bytes": state_bytes,
        "total_bytes": param_bytes + state_bytes,
        "adam_bytes": adam_bytes,
        "ratio_vs_adam": (param_bytes + state_bytes) / adam_bytes,
        "convention": CONVENTION,
        "roles": [row for row in rows.values() if row["leaves"] or row["state_bytes"]],
    }


def _owner(path: tuple[Any, ...], role_of: dict[tuple[Any, ...], str]) -> str:
    """The role of the parameter whose whole path lies, in one piece, in the path of a state leaf."""
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length, -1, -1):
            role = role_of.get(path[start : start + length])
            if role is not None:
                return role
    return "shared"


def memory_view(report: dict[str, Any], title: str = "Memory") -> Any:
    """A `rich.table.Table` of a `memory_report`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> memory_view(memory_report(optax.adam(1.0), {"w": jnp.zeros((2, 2))})).row_count
        3
    """
    from rich.table import Table

    view = Table(
        title=title, caption=f"{report['ratio_vs_adam']:.3f} of Adam's bytes ({report['convention']})"
    )
    columns = ("role", "leaves", "elements", "param_bytes", "state_bytes")
    for column in columns:
        view.add_column(column.replace("_", " "), justify="left" if column == "role" else "right")
    for row in report["roles"]:
        view.add_row(row["role"], *(f"{row[column]:,}" for column in columns[1:]))
    view.add_row("total", "", "", f"{report['param_bytes']:,}", f"{report['state_bytes']:,}")
    return view
