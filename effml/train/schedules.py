"""Learning-rate schedules, as functions of the step count that optax optimizers take.

All of them warm up linearly over the first steps; what follows depends on the name. With w warm-up steps, n
steps in all, peak p, final f = final_fraction · p, step count t (from 0) and progress x = (t − w) / (n − w):

    t < w      p (t + 1) / w                         (so that the first step already moves)
    constant   p
    cosine     f + (p − f) (1 + cos πx) / 2
    linear     p + (f − p) x
    wsd        p until 80 % of the steps, then linear from p to f ("warm-up, stable, decay", arXiv:2404.06395)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from effml._validate import one_of, positive

__all__ = ["SCHEDULES", "schedule"]

SCHEDULES = ("constant", "cosine", "linear", "wsd")
_STABLE_FRACTION = 0.8


@functools.lru_cache(maxsize=256)
def schedule(
    name: str, peak: float, steps: int, warmup_fraction: float = 0.1, final_fraction: float = 0.1
) -> Callable[..., Array]:
    """Builds the learning rate as a function of the step count.

    The same arguments return the same function object, so an optimizer factory may be cached on it.

    Args:
        name: constant, cosine, linear or wsd.
        peak: the largest learning rate.
        steps: number of optimizer steps in the whole run.
        warmup_fraction: share of the steps that the linear warm-up takes, in [0, 1).
        final_fraction: learning rate at the end, as a share of `peak`, in [0, 1]; constant ignores it.

    Returns:
        A function from an integer step count (from 0) to a float32 scalar; past the last step it stays at the
        end.

    Raises:
        ValueError: for an unknown name, steps or peak that are not positive, or fractions out of range.

    Example:
        >>> rate = schedule("linear", 1.0, 11, warmup_fraction=0.1, final_fraction=0.0)
        >>> [round(float(rate(t)), 2) for t in (0, 1, 6, 11)]
        [1.0, 1.0, 0.5, 0.0]
    """
    one_of("schedule", name, SCHEDULES)
    positive("peak", peak)
    positive("steps", steps)
    if not 0 <= warmup_fraction < 1:
        raise ValueError(f"warmup_fraction={warmup_fraction!r} must be at least 0 and below 1")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction!r} must be between 0 and 1")
    warmup = round(warmup_fraction * steps)
    final = peak * final_fraction
    stable = max(warmup, round(_STABLE_FRACTION * steps))

    def rate(count) -> Array:
        t = jnp.asarray(count, jnp.float32)
        x = jnp.clip((t - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        if name == "cosine":
            main = final + (peak - final) * (1 + jnp.cos(jnp.pi * x)) / 2
        elif name == "linear":
            main = peak + (final - peak) * x
        elif name == "wsd":
            main = peak + (final - peak) * jnp.clip((t - stable) / max(steps - stable, 1), 0.0, 1.0)
        else:
            main = jnp.full_like(t, peak)
        return jnp.where(t < warmup, peak * (t + 1) / max(warmup, 1), main)

    return rate
