"""Steepest descent on orthogonal matrices, by Cayley transforms.

A rotation has n (n - 1) / 2 degrees of freedom and n^2 entries: an ordinary step leaves the rotations, and projecting
back costs what was gained. The Cayley transform of a skew matrix is a rotation, so that

    W = skew part of -G^T U + ...,    a = min(max_step, 1 / ||W||_1),    X <- X cayley(a W)^T

is a step that stays on them. `effml.linalg.cayley_step` has the formula in full.

Things to know:

* Updates are X_new - X, as optax wants; keep the parameters in float32. In bfloat16 a rotation is off by 1e-2 within a
  few steps, so narrower leaves are refused.
* Give it rotations alone (`optax.partition` by label, or a tree of nothing else). Weight decay, clipping by global norm
  or momentum of another transform in the same chain take them off the orthogonal group.
* `max_step` is a ceiling, and 1 / ||W||_1 often the smaller: `state.step` has what was taken.
* The determinant never changes: a rotation cannot become a reflection.

Source: Liu et al., SpinQuant, arXiv 2405.16406, and its code; Li, Li, Todorovic, arXiv 2002.01113.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from effml import linalg, trees
from effml._validate import count

__all__ = ["CayleyState", "scale_by_cayley"]

_OFF = 1e-2


class CayleyState(NamedTuple):
    """State of `scale_by_cayley`.

    Attributes:
        count: int32, steps taken.
        step: for each leaf [..., n, n], the sizes [...] of the last steps: at most the ceiling.
    """

    count: Array
    step: PyTree


def scale_by_cayley(
    max_step: Any = 1.5, *, exact: bool = True, iters: int | None = None, renorm_every: int = 20
) -> optax.GradientTransformation:
    r"""Moves orthogonal matrices [..., n, n] against their gradients and keeps them orthogonal.

    $$X \leftarrow \left((I - aW/2)^{-1}(I + aW/2)\,U^T\right)^T, \qquad a = \min(\text{max step}, 1/\|W\|_1)$$

    with U the rows of X at length 1 and W skew (`effml.linalg.cayley_step`). The update is the whole step: no learning
    rate comes after it.

    Args:
        max_step: ceiling of a, a number or a schedule of the step count.
        exact: by a solve; else by fixed-point products, for widths above about 1024.
        iters: products of that form. None takes as many as rounding asks for; 5, as in SpinQuant's code, can leave
            1e-2 from orthogonal in one step, where gradients lie along the axes.
        renorm_every: steps between QR factorisations that take rounding away.

    Returns:
        An optax transformation whose `update` needs `params`.

    Raises:
        ValueError: bad numbers, at once; at init, leaves that are not square or not orthogonal, naming them.
        TypeError: leaves narrower than float32.

    Example:
        >>> target = jnp.array([[0.0, -1.0], [1.0, 0.0]])
        >>> loss = lambda params: -jnp.sum(params["r"] * target)
        >>> params, optimizer = {"r": jnp.eye(2)}, scale_by_cayley()
        >>> state = optimizer.init(params)
        >>> for _ in range(20):
        ...     updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> bool(jnp.abs(params["r"] - target).max() < 1e-3)
        True
    """
    if isinstance(max_step, (int, float)) and not 0 < max_step < math.inf:
        raise ValueError(f"max_step={max_step!r} must be above 0 and finite")
    if iters is not None:
        count("iters", iters)
    count("renorm_every", renorm_every)

    def init(params: PyTree) -> CayleyState:
        for name, leaf in zip(trees.leaf_names(params), jax.tree.leaves(params)):
            _check(name, leaf)
        return CayleyState(
            jnp.zeros([], jnp.int32),
            jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape[:-2], jnp.promote_types(leaf.dtype, jnp.float32)), params
            ),
        )

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, CayleyState]:
        if params is None:
            raise ValueError("scale_by_cayley needs params: call update(gradient, state, params)")
        ceiling = max_step(state.count) if callable(max_step) else max_step
        renormalize = (state.count + 1) % renorm_every == 0

        def step(matrix: Any, gradient: Any) -> linalg.CayleyStep:
            return linalg.cayley_step(
                matrix, gradient, ceiling, exact=exact, iters=iters, renormalize=renormalize
            )

        leaves, structure = jax.tree.flatten(params)
        moved = [step(*pair) for pair in zip(leaves, structure.flatten_up_to(updates))]
        changes = [(one.matrix - leaf).astype(leaf.dtype) for one, leaf in zip(moved, leaves)]
        state = CayleyState(
            jnp.asarray(optax.safe_increment(state.count)), structure.unflatten([one.step for one in moved])
        )
        return structure.unflatten(changes), state

    return optax.GradientTransformation(init, update)


def _check(name: str, leaf: Any) -> None:
    if leaf.ndim < 2 or leaf.shape[-1] != leaf.shape[-2]:
        raise ValueError(
            f"{name} of shape {leaf.shape} is no square matrix; give scale_by_cayley rotations alone"
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.finfo(leaf.dtype).bits < 32:
        raise TypeError(f"{name} is {leaf.dtype}; rotations drift away in less than float32")
    if not isinstance(leaf, Tracer):
        off = float(np.max(linalg.orthogonality_error(leaf), initial=0.0))
        if not off < _OFF:
            raise ValueError(
                f"{name} is not orthogonal: an entry of |X^T X - I| is {off:.3g}; start from a rotation, for example "
                "effml.linalg.hadamard"
            )
