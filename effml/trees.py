"""Parameter trees: the name, role and axes of every leaf, and how many bytes they take.

An optimizer that treats a token embedding, an output head, a hidden matrix and a bias differently has to know
which leaf is which. That is decided here, once, from the leaf's path and shape, and `rule_table` shows the
decision:

| role | what it is | example path |
|---|---|---|
| `matrix` | a linear map inside the network | `layers.0.attention.output.kernel` |
| `embedding` | a lookup table [entries, features] | `embedding.table` |
| `head` | the map to the logits | `head.kernel` |
| `vector` | gains, biases and anything else with fewer than two axes | `final_norm.scale` |
| `frozen` | integer and boolean leaves, which no optimizer moves | `codes` |

Any pytree works: a plain dict, a linen `params` dict, an `nnx.State`. Leaves may be arrays or
`jax.ShapeDtypeStruct`.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from effml._validate import one_of

__all__ = [
    "EMBEDDING_PATTERNS",
    "HEAD_PATTERNS",
    "ROLES",
    "MuonDimensionNumbers",
    "byte_count",
    "dimension_numbers",
    "leaf_names",
    "parameter_roles",
    "path_name",
    "rule_table",
    "rule_table_view",
]

ROLES = ("matrix", "embedding", "head", "vector", "frozen")
HEAD_PATTERNS = ("lm_head", "head", "output_head", "logits")
EMBEDDING_PATTERNS = ("embed", "position")

_VECTOR_LEAVES = {"bias", "scale", "gain", "gamma", "beta"}
_NORM = re.compile(r"(^|_)(ln|layer_?norm|rms_?norm|[a-z]*norm)(_|\d|$)")
_STACKS = {"layers", "blocks"}
_SPLIT_PROJECTIONS = {"query", "key", "value", "qkv", "q_proj", "k_proj", "v_proj"}
_MERGE_PROJECTIONS = {"out", "output", "o_proj", "out_proj"}


def _component(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def path_name(path: Sequence[Any]) -> str:
    """The dotted name of a leaf, the same for dicts, lists, dataclasses and `nnx.State`.

    Args:
        path: a key path as `jax.tree_util.tree_flatten_with_path` gives it.

    Returns:
        Names joined by dots. The `value` attribute in which NNX variables keep their array is left out.

    Example:
        >>> import jax
        >>> tree = {"layers": [{"kernel": 1.0}]}
        >>> path_name(jax.tree_util.tree_flatten_with_path(tree)[0][0][0])
        'layers.0.kernel'
    """
    keys = list(path)
    if len(keys) > 1 and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
        keys = keys[:-1]
    return ".".join(_component(key) for key in keys)


def leaf_names(tree: PyTree) -> list[str]:
    """The dotted names of all leaves, in `jax.tree.leaves` order.

    Example:
        >>> leaf_names({"head": {"bias": 0.0, "kernel": 0.0}})
        ['head.bias', 'head.kernel']
    """
    return [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def byte_count(tree: PyTree) -> int:
    """Bytes of all array leaves (or `ShapeDtypeStruct` leaves); other leaves count nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> byte_count({"a": jnp.zeros((2, 3)), "b": jnp.zeros(4, jnp.bfloat16)})
        32
    """
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "dtype") and hasattr(leaf, "size")
    )


def _components(name: str) -> list[str]:
    return name.lower().split(".")


def _in_head(components: Sequence[str], patterns: Sequence[str]) -> bool:
    """A pattern is whole path components (`head`, `decoder.output`), with shell wildcards."""
    for pattern in patterns:
        wanted = pattern.lower().split(".")
        for start in range(len(components) - len(wanted) + 1):
            if all(fnmatch.fnmatchcase(have, want) for have, want in zip(components[start:], wanted)):
                return True
    return False


def _in_embedding(components: Sequence[str], patterns: Sequence[str]) -> bool:
    """A pattern is the beginning of a word: `embed` finds `token_embedding`, not `unembed`."""
    # A Dense inside an embedding module (a patch embedding) is a linear map, and its leaf is called kernel.
    if components[-1] == "kernel":
        return False
    words = [word for component in components for word in re.split(r"[^a-z0-9]+", component)]
    return any(word.startswith(pattern.lower()) for word in words for pattern in patterns)


def _is_vector(components: Sequence[str], ndim: int) -> bool:
    if ndim < 2 or components[-1] in _VECTOR_LEAVES:
        return True
    return any(_NORM.search(component) for component in components)


def _is_frozen(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jnp.inexact)


def parameter_roles(
    params: PyTree,
    head: Sequence[str] = HEAD_PATTERNS,
    embedding: Sequence[str] = EMBEDDING_PATTERNS,
    *,
    tied_head: bool = False,
) -> PyTree:
    """The role of every leaf: `matrix`, `embedding`, `head`, `vector` or `frozen`.

    Args:
        params: parameters, gradients or their shapes.
        head: names of the output layer. A name must be a whole path component, so `head` finds `head.kernel`
            but not `attention_head.kernel`, and `attention.output.kernel` is no head. Dots join components
            and shell
            wildcards are allowed: `("decoder.output", "*_logits")`.
        embedding: beginnings of the words that mark lookup tables.
        tied_head: the model has no head of its own and uses its token embedding transposed; that embedding
            then gets the role `head`.

    Returns:
        A tree of the same structure with a string for every leaf.

    Raises:
        ValueError: `tied_head` is set but a head exists, or not exactly one embedding can be meant.
        TypeError: a leaf is no array.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"embedding": {"table": jnp.zeros((8, 4))}, "head": {"kernel": jnp.zeros((4, 8))}}
        >>> parameter_roles(params)
        {'embedding': {'table': 'embedding'}, 'head': {'kernel': 'head'}}
    """

    def role(path: Any, leaf: Any) -> str:
        components = _components(path_name(path))
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "ndim")):
            raise TypeError(f"parameter {path_name(path)!r} is a {type(leaf).__name__}, not an array")
        if _is_frozen(leaf):
            return "frozen"
        if _is_vector(components, leaf.ndim):
            return "vector"
        if _in_head(components, head):
            return "head"
        return "embedding" if _in_embedding(components, embedding) else "matrix"

    roles = jax.tree_util.tree_map_with_path(role, params)
    return _promote_tied_embedding(roles) if tied_head else roles


def _promote_tied_embedding(roles: PyTree) -> PyTree:
    paths, treedef = jax.tree_util.tree_flatten_with_path(roles)
    names = [path_name(path) for path, _ in paths]
    heads = [name for name, (_, role) in zip(names, paths) if role == "head"]
    if heads:
        raise ValueError(f"tied_head=True, but the parameters have a head of their own: {', '.join(heads)}")
    tables = [name for name, (_, role) in zip(names, paths) if role == "embedding"]
    tokens = [name for name in tables if not _in_embedding(_components(name), ("pos", "segment", "type"))]
    if len(tokens) != 1:
        raise ValueError(
            f"tied_head=True needs exactly one token embedding, found {len(tokens)}: "
            f"{', '.join(tokens) or 'none'}; give the roles as a tree of labels instead"
        )
    return jax.tree.unflatten(
        treedef, ["head" if name == tokens[0] else role for name, (_, role) in zip(names, paths)]
    )


def dimension_numbers(
    params: PyTree,
    roles: PyTree | None = None,
    *,
    layout: str = "flax",
    include: Collection[str] = ("matrix", "embedding", "head"),
    overrides: Mapping[str, MuonDimensionNumbers] | None = None,
) -> PyTree:
    """Which axes of each leaf are inputs and which are outputs, as `optax.contrib.MuonDimensionNumbers`.

    Axes that are neither are batch axes: layers of a scanned stack, experts. Names tell apart what shapes
    cannot:

    | leaf | shape | input axes | output axes |
    |---|---|---|---|
    | Dense kernel | [in, out] | 0 | 1 |
    | the same, scanned (`layers.` without an index) | [layers, in, out] | 1 | 2 |
    | attention projections of DenseGeneral (`query`, `key`, `value`) | [in, heads, size] | 0 | 1, 2 |
    | its output projection (`out`, `output`) | [heads, size, out] | 0, 1 | 2 |
    | any other three axes | [batch, in, out] | 1 | 2 |
    | convolution | [..., in, out] | all but the last | last |
    | embedding | [entries, features] | 0 | 1 |
    | embedding used transposed as the head | [entries, features] | 1 | 0 |

    Args:
        params: parameters, gradients or their shapes.
        roles: a tree as `parameter_roles` returns it; None = `parameter_roles(params)`.
        layout: `flax` for kernels [in, out], `torch` for [out, in] and [out, in, height, width].
        include: roles that get axes. Leaves of other roles get None, which is how `optax.contrib.muon` knows
            to leave them to Adam.
        overrides: shell patterns of leaf names, each with the axes to use for what it matches.

    Returns:
        A tree of `MuonDimensionNumbers` or None, one per leaf.

    Raises:
        ValueError: unknown `layout`, or a pattern of `overrides` matches no leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> dimension_numbers({"dense": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}})
        {'dense': {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1,))}}
    """
    one_of("layout", layout, ("flax", "torch"))
    roles = parameter_roles(params) if roles is None else roles
    overrides = dict(overrides or {})
    names = leaf_names(params)
    unused = [pattern for pattern in overrides if not fnmatch.filter(names, pattern)]
    if unused:
        raise ValueError(f"overrides={unused[0]!r} matches none of the leaves: {', '.join(names[:12])}")
    axes = _torch_axes if layout == "torch" else _flax_axes

    def spec(path: Any, leaf: Any, role: str) -> MuonDimensionNumbers | None:
        name = path_name(path)
        for pattern, numbers in overrides.items():
            if fnmatch.fnmatchcase(name, pattern):
                return numbers
        if role not in include:
            return None
        return MuonDimensionNumbers(*axes(_components(name), leaf.ndim, role))

    return jax.tree_util.tree_map_with_path(spec, params, roles)


Axes = tuple[tuple[int, ...], tuple[int, ...]]


def _flax_axes(components: Sequence[str], ndim: int, role: str) -> Axes:
    axes = tuple(range(ndim))
    if role == "head" and ndim == 2 and components[-1] != "kernel":
        # Lookup tables are [entries, features]; as a head such a table is used transposed.
        return ((1,), (0,)) if _in_embedding(components, EMBEDDING_PATTERNS) else ((0,), (1,))
    if _is_stacked(components) and ndim > 2:
        axes = axes[1:]
    module = components[-2] if len(components) > 1 else ""
    if len(axes) == 3 and module in _SPLIT_PROJECTIONS:
        return axes[:1], axes[1:]
    if len(axes) >= 4 or (len(axes) == 3 and (module in _MERGE_PROJECTIONS or "conv" in module)):
        return axes[:-1], axes[-1:]
    return axes[-2:-1], axes[-1:]


def _torch_axes(components: Sequence[str], ndim: int, role: str) -> Axes:
    if role == "embedding":
        return (0,), (1,)
    return tuple(range(1, ndim)), (0,)


def _is_stacked(components: Sequence[str]) -> bool:
    """Whether the layers of a stack share this array: `layers.` without an index after it."""
    pairs = itertools.pairwise(components)
    return any(component in _STACKS and not following.isdigit() for component, following in pairs)


def rule_table(
    params: PyTree,
    roles: PyTree | None = None,
    dimensions: PyTree | None = None,
    *,
    rules: Mapping[str, str] | Callable[[str], str] | None = None,
) -> list[dict[str, Any]]:
    """One row per leaf: its path, shape, role, axes and (with `rules`) what the optimizer does with it.

    Args:
        params: parameters or their shapes.
        roles: as `parameter_roles`; None = computed.
        dimensions: as `dimension_numbers`; None = computed.
        rules: words for each role, e.g. `effml.optimize.SCALE_RULES`; they fill the column `rule`.

    Returns:
        Rows with `path`, `shape`, `role`, `axes` (`"in 0, out 1"` or `""`) and perhaps `rule`.

    Example:
        >>> import jax.numpy as jnp
        >>> rule_table({"head": {"kernel": jnp.zeros((4, 8))}})
        [{'path': 'head.kernel', 'shape': (4, 8), 'role': 'head', 'axes': 'in 0, out 1'}]
    """
    roles = parameter_roles(params) if roles is None else roles
    dimensions = dimension_numbers(params, roles) if dimensions is None else dimensions
    rows = []

    def add(path: Any, leaf: Any, role: str, numbers: MuonDimensionNumbers | None) -> None:
        row = {
            "path": path_name(path),
            "shape": tuple(leaf.shape),
            "role": role,
            "axes": "" if numbers is None else f"in {_words(numbers[0])}, out {_words(numbers[1])}",
        }
        if rules is not None:
            row["rule"] = rules(role) if callable(rules) else rules.get(role, "")
        rows.append(row)

    jax.tree_util.tree_map_with_path(add, params, roles, dimensions)
    return rows


def _words(axes: int | Sequence[int]) -> str:
    return " ".join(str(axis) for axis in ([axes] if isinstance(axes, int) else axes))


def rule_table_view(rows: Sequence[Mapping[str, Any]], title: str = "Which rule each parameter gets") -> Any:
    """The rows of `rule_table` as a `rich.table.Table`, ready to print.

    Example:
        >>> import jax.numpy as jnp
        >>> view = rule_table_view(rule_table({"head": {"kernel": jnp.zeros((4, 8))}}))
        >>> view.row_count
        1
    """
    from rich.table import Table

    view = Table(title=title)
    columns = list(rows[0]) if rows else ["path", "shape", "role", "axes"]
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        cells = (
            " x ".join(map(str, cell)) if isinstance(cell, tuple) else str(cell) for cell in row.values()
        )
        view.add_row(*cells)
    return view
