from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from effml.train import SCHEDULES, schedule


def oracle(name: str, t: int, peak: float, steps: int, warmup: int, final: float) -> float:
    """The definition in plain Python, one branch after another."""
    if t < warmup:
        return peak * (t + 1) / warmup
    if name == "constant":
        return peak
    if name == "wsd":
        begin = max(warmup, round(0.8 * steps))
        return peak if t < begin else peak - (peak - final) * min((t - begin) / (steps - begin), 1)
    x = min((t - warmup) / (steps - warmup), 1)
    if name == "linear":
        return peak - (peak - final) * x
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * x))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(100, 0.1), (7, 0.0), (50, 0.9)])
def test_schedule_equals_its_definition_at_every_step(name, steps, warmup):
    rate = schedule(name, 0.02, steps, warmup, 0.25)
    got = rate(jnp.arange(steps + 5))
    want = [oracle(name, t, 0.02, steps, round(warmup * steps), 0.005) for t in range(steps + 5)]
    assert got.dtype == jnp.float32
    assert jnp.allclose(got, jnp.array(want), rtol=1e-5, atol=1e-9)
    assert jnp.allclose(jax.jit(rate)(3), rate(3), rtol=1e-6)


def test_same_arguments_give_the_same_object():
    assert schedule("cosine", 1e-3, 10) is schedule("cosine", 1e-3, 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cosin", 1.0, 10), "did you mean 'cosine'"),
        (("cosine", 0.0, 10), "peak=0.0"),
        (("cosine", 1.0, 0), "steps=0"),
        (("cosine", 1.0, 10, 1.0), "warmup_fraction=1.0"),
        (("cosine", 1.0, 10, 0.1, 1.5), "final_fraction=1.5"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        schedule(*arguments)
