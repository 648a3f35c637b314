"""Numbers of the user's: what is refused, and in which words."""

import jax.numpy as jnp
import numpy as np
import pytest

from effml._validate import count, floating_dtype, seed_in_range


@pytest.mark.parametrize("value", [1, np.int64(7), np.uint8(3)])
def test_integers_above_zero_are_counts(value):
    assert type(count("steps", value)) is int
    assert count("steps", value) == value


@pytest.mark.parametrize("value", [2.0, 2.5, np.float32(1), "2", None])
def test_other_types_are_no_counts(value):
    """2.5 steps were three, and a mesh of 1.5 devices one."""
    with pytest.raises(TypeError, match=r"steps=.* must be an integer"):
        count("steps", value)


@pytest.mark.parametrize("value", [0, -3, float("nan"), -0.5])
def test_counts_are_above_zero(value):
    with pytest.raises(ValueError, match=r"steps=.* must be above 0"):
        count("steps", value)


def test_seeds_that_jax_would_cut_to_another_are_refused():
    """jax.random.key(2**32 + 5) is jax.random.key(5)."""
    assert seed_in_range(2**32 - 1) == 2**32 - 1
    with pytest.raises(ValueError, match="32 bits"):
        seed_in_range(2**32 + 5)
    with pytest.raises(ValueError, match="must not be negative"):
        seed_in_range(-1)


def test_floating_dtypes_only():
    """An integer momentum rounded every small gradient to zero."""
    assert floating_dtype("mu_dtype", None) is None
    assert floating_dtype("mu_dtype", "bfloat16") == floating_dtype("mu_dtype", jnp.bfloat16) == jnp.bfloat16
    for bad in (jnp.int32, bool, "complex64"):
        with pytest.raises(ValueError, match=r"mu_dtype=.* must be a floating-point dtype"):
            floating_dtype("mu_dtype", bad)
    for bad in ("float33", 3, jnp.sin):
        with pytest.raises(ValueError, match=r"mu_dtype=.* is no dtype"):
            floating_dtype("mu_dtype", bad)
