from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.report import Result
from experiments import _cocd_problems as problems
from experiments import cocd

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def digits():
    return problems.digits_problem()


def test_the_problems_have_the_sizes_that_the_spec_gives(digits):
    assert digits.size == 1210
    assert [len(part[0]) for part in (digits.train, digits.test)] == [1400, 397]
    assert problems.arm_problem(64).size == 12 * 64 + 64 + 64 * 4 + 4
    assert 265_000 < problems.resnet_problem(16, 3).size < 275_000


def test_torques_are_those_of_the_textbook_for_one_and_two_rods():
    generator = np.random.default_rng(0)
    q, v, a = generator.normal(size=(3, 2))
    with jax.enable_x64(True):
        torques = jax.jit(problems.arm_torques)
        one = torques(*(jnp.asarray(x[:1]) for x in (q, v, a)))
        two = torques(*map(jnp.asarray, (q, v, a)))
    np.testing.assert_allclose(one, a[0] / 3 + 9.81 * np.cos(q[0]) / 2, rtol=1e-12)
    # Two uniform rods of length and mass 1, angles between links (Spong, Hutchinson, Vidyasagar, section 7.3).
    c2, s2 = np.cos(q[1]), np.sin(q[1])
    mass = np.array([[5 / 3 + c2, 1 / 3 + c2 / 2], [1 / 3 + c2 / 2, 1 / 3]])
    turning = -s2 / 2 * np.array([2 * v[0] * v[1] + v[1] ** 2, -(v[0] ** 2)])
    outer = 9.81 / 2 * np.cos(q.sum())
    gravity = np.array([9.81 * 1.5 * np.cos(q[0]) + outer, outer])
    np.testing.assert_allclose(two, mass @ a + turning + gravity, rtol=1e-12)


def moves(make, f, x, seeds):
    """Mean of one step's updates over keys."""

    def one(seed):
        optimizer = make(1.0, jax.random.key(seed))
        return optimizer.update(jnp.zeros_like(x), optimizer.init(x), x, value_fn=f)[0]

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(seeds))).mean(0)


def test_random_directions_give_the_gradient_on_average():
    x = jnp.array([1.0, -2.0, 0.5])
    f = lambda x: jnp.sum(jnp.array([1.0, 2.0, 3.0]) * x**2)
    make = functools.partial(problems.spsa, directions=8, radius=0.1)
    np.testing.assert_allclose(moves(make, f, x, 3000), -2 * np.array([1.0, 2.0, 3.0]) * x, atol=0.25)


def test_the_evolution_strategy_descends_and_uses_its_population():
    pytest.importorskip("evosax")
    x = jnp.array([1.0, -2.0, 0.0])
    calls = []

    def f(x):
        jax.debug.callback(lambda value: calls.append(value), x[0])
        return jnp.sum(x**2)

    step = moves(functools.partial(problems.open_es, population=6, radius=0.1), f, x, 50)
    jax.effects_barrier()
    assert len(calls) == 6 * 50
    assert step[0] < -0.1 < 0.1 < step[1]


def test_runs_side_by_side_equal_runs_one_after_another(digits):
    method = problems.coordinate_method((0.1, 0.3), 4)
    make = functools.partial(
        problems.trainer, digits, method, steps=4, batch=8, seeds=(0, 1), points=2, quick=True
    )
    apart, together = make(side_by_side=False)(), make(side_by_side=True)()
    for one, other in zip(apart, together):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert apart.loss.shape == (2, 2)
    assert apart.curve.shape == (2, 2, 3)
    assert len(np.unique(apart.loss)) == 4


def test_sgd_takes_the_step_of_the_gradient():
    x = jnp.array([1.0, 2.0])
    optimizer = problems.sgd(0.1, jax.random.key(0))
    step, _ = optimizer.update(x, optimizer.init(x), x, value_fn=lambda x: jnp.sum(x**2))
    np.testing.assert_allclose(step, -0.2 * x)


def test_mnist_is_read_from_the_package_and_replaced_by_digits_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFML_MNIST", str(tmp_path))
    images, targets, name = problems.mnist_images()
    assert images.shape == (1797, 14, 14)
    assert name == "digits at 14x14"
    (tmp_path / "src" / "digits").mkdir(parents=True)
    for digit in range(10):
        pixels = np.full((digit + 1, 28, 28), digit / 10)
        (tmp_path / "src" / "digits" / f"{digit}.json").write_text(
            json.dumps({"data": pixels.ravel().tolist()})
        )
    images, targets, name = problems.mnist_images()
    assert name == "MNIST-10k at 14x14"
    np.testing.assert_allclose(images, np.broadcast_to(targets[:, None, None] / 10, (55, 14, 14)), rtol=1e-6)
    assert np.bincount(targets).tolist() == list(range(1, 11))


def test_notes_say_who_is_better_and_a_failed_gate_stays_failed():
    result = Result(method="cocd", preset="cpu", seeds=(0,))
    row = {"problem": "digits", "rate": 0.1, "calls": "1", "score": 0.9, "grid": ""}
    for method, loss in (
        ("CoCD, decay 0.9, tuned", 0.2),
        ("BCCD, tuned", 0.3),
        ("SPSA, tuned", 0.1),
        ("SGD on the gradient, tuned", 0.0),
    ):
        result.rows.append({**row, "method": method, "loss": loss})
    result.summary |= dict.fromkeys(
        (
            "matched_ratio",
            "matched_cocd_score",
            "matched_bccd_score",
            "two_runs_differ_by",
            "slow_cycle_ratio",
            "fast_growth",
            "rough_ratio",
            "arm_ratio",
            "rough_small",
            "rough_half",
            "rough_full",
            "bfloat16_best_radius",
            "float32_best_radius",
        ),
        0.5,
    )
    assert "CoCD ends at 0.2; lower: SPSA (0.1)." in cocd.notes(result)[0]
    judged = result.judged(cocd.CHECKS)
    assert not judged.holds
    assert [check.holds for check in judged.checks] == [False, False, True, False, True, False, False, True]


def test_the_presets_measure_as_often_for_every_method():
    config = dataclasses.replace(cocd.PRESETS["cpu"], budget=3)
    x = jnp.linspace(0.1, 1.0, 7)
    for name, method in cocd.zeroth_order(config, (0.1,), 3).items():
        calls = []

        def f(x, calls=calls):
            jax.debug.callback(lambda value: calls.append(value), x[0])
            return jnp.sum(x**2)

        optimizer = method.make(0.1, jax.random.key(0))
        jax.jit(lambda x, o=optimizer, f=f: o.update(x, o.init(x), x, value_fn=f)[0])(x)
        jax.effects_barrier()
        assert len(calls) == 6, name
