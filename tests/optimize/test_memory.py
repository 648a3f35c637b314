from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from effml.optimize import make_optimizer, memory_report, memory_view, scale
from tests.conformance.optimizer_cases import OptimizerCase

CASES = [
    OptimizerCase(
        "optax adamw", optax.adamw, options={"weight_decay": 0.0}, parabola_rate=0.1, rosenbrock_rate=0.1
    ),
    OptimizerCase(
        "optax muon",
        optax.contrib.muon,
        options={"adam_learning_rate": None},
        static_args=("adam_learning_rate", "muon_weight_dimension_numbers"),
        parabola_rate=0.1,
        rosenbrock_rate=0.03,
        sharded_tolerance=1e-4,
    ),
]

# Width, MLP width, layers of the LLaMA models in the SCALE paper's released configurations, and the GB that it and we
# compute for them: (parameters, Adam, SCALE, ratio, Muon), two bytes for every number, GB = 1e9.
PAPER = {
    "60M": ((512, 1376, 8), (58.1e6, 0.348, 0.149, 0.427, 0.232)),
    "130M": ((768, 2048, 12), (134.1e6, 0.805, 0.317, 0.395, 0.536)),
    "350M": ((1024, 2736, 24), (368.0e6, 2.208, 0.802, 0.363, 1.472)),
    "1B": ((2048, 5461, 24), (1339.1e6, 8.034, 2.810, 0.350, 5.356)),
    "7B": ((4096, 11008, 32), (6738.4e6, 40.43, 13.74, 0.340, 26.95)),
}
VOCABULARY = 32000


def llama_shapes(width, mlp_width, layers, dtype=jnp.bfloat16):
    def matrix(*shape):
        return {"kernel": jax.ShapeDtypeStruct(shape, dtype)}

    def norm():
        return {"scale": jax.ShapeDtypeStruct((width,), dtype)}

    return {
        "embedding": {"table": jax.ShapeDtypeStruct((VOCABULARY, width), dtype)},
        "layers": [
            {
                "attention_norm": norm(),
                "attention": {name: matrix(width, width) for name in ("query", "key", "value", "output")},
                "mlp_norm": norm(),
                "mlp": {
                    "gate": matrix(width, mlp_width),
                    "up": matrix(width, mlp_width),
                    "down": matrix(mlp_width, width),
                },
            }
            for _ in range(layers)
        ],
        "final_norm": norm(),
        "head": matrix(width, VOCABULARY),
    }


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_memory_table_is_reproduced_from_shapes_alone(name):
    (width, mlp_width, layers), (parameters, adam, ours, ratio, muon) = PAPER[name]
    shapes = llama_shapes(width, mlp_width, layers)
    report = memory_report(scale(1e-3), shapes)
    gains = (2 * layers + 1) * width
    elements = 2 * VOCABULARY * width + layers * (4 * width**2 + 3 * width * mlp_width) + gains
    assert report["param_bytes"] == 2 * elements
    assert elements == pytest.approx(parameters, rel=1e-3)
    shared = next(row["state_bytes"] for row in report["roles"] if row["role"] == "shared")
    assert shared <= 16
    assert report["state_bytes"] - shared == 2 * (VOCABULARY * width + 2 * gains)
    assert report["adam_bytes"] / 1e9 == pytest.approx(adam, rel=2e-3)
    assert report["total_bytes"] / 1e9 == pytest.approx(ours, rel=4e-3)
    assert report["ratio_vs_adam"] == pytest.approx(ratio, abs=6e-4)
    # The paper's Muon column keeps momentum for everything and no second moment anywhere.
    momentum_only = optax.chain(optax.trace(0.95))
    assert memory_report(momentum_only, shapes)["total_bytes"] / 1e9 == pytest.approx(muon, rel=2e-3)


def test_muon_as_it_is_practised_costs_more_than_the_papers_column_and_less_than_adam():
    shapes = llama_shapes(512, 1376, 8)
    muon = memory_report(make_optimizer("muon", learning_rate=1e-3), shapes)
    by_role = {row["role"]: row for row in muon["roles"]}
    assert by_role["matrix"]["state_bytes"] == by_role["matrix"]["param_bytes"]
    assert by_role["head"]["state_bytes"] == 2 * by_role["head"]["param_bytes"]
    assert 0.667 < muon["ratio_vs_adam"] < 1
    assert memory_report(make_optimizer("adamw", learning_rate=1e-3), shapes)[
        "ratio_vs_adam"
    ] == pytest.approx(1, 1e-6)


def test_state_is_attributed_to_the_role_of_its_parameter_and_counters_to_shared():
    params = {
        "head": {"kernel": jnp.zeros((4, 8))},
        "mix": {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)},
    }
    report = memory_report(scale(optax.constant_schedule(1e-3)), params)
    rows = {row["role"]: row for row in report["roles"]}
    assert rows["head"] == {
        "role": "head",
        "leaves": 1,
        "elements": 32,
        "param_bytes": 128,
        "state_bytes": 128,
    }
    assert rows["matrix"]["state_bytes"] == 0
    assert rows["vector"]["state_bytes"] == 2 * 16
    assert rows["shared"]["leaves"] == 0
    assert sum(row["state_bytes"] for row in rows.values()) == report["state_bytes"]
    assert sum(row["param_bytes"] for row in rows.values()) == report["param_bytes"] == 128 + 64 + 16


def test_counting_gradients_too_gives_the_other_convention_of_about_a_half():
    report = memory_report(scale(1e-3), llama_shapes(512, 1376, 8, jnp.float32))
    gradients = report["param_bytes"]
    assert 0.505 < (report["total_bytes"] + gradients) / (report["adam_bytes"] + gradients) < 0.571


def test_a_bare_array_is_accepted_and_an_empty_tree_is_not():
    assert memory_report(optax.adam(1.0), jnp.zeros((2, 3)))["ratio_vs_adam"] == 1.0
    with pytest.raises(ValueError, match="params holds no arrays"):
        memory_report(optax.adam(1.0), {})


def test_labels_may_be_a_function_and_must_fit_the_parameters():
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
    labels = {"a": "head", "b": "frozen"}
    report = memory_report(
        optax.adam(1.0), params, labels=lambda shapes: {name: labels[name] for name in shapes}
    )
    assert report == memory_report(optax.adam(1.0), params, labels=labels)
    assert [row["role"] for row in report["roles"]] == ["head", "frozen", "shared"]
    for wrong in ({"a": "head"}, ["head", "frozen"], lambda shapes: "head"):
        with pytest.raises(ValueError, match="labels is a tree of another structure than params"):
            memory_report(optax.adam(1.0), params, labels=wrong)


def test_the_printed_table_has_every_role_and_a_total():
    report = memory_report(scale(1e-3), llama_shapes(64, 176, 1))
    view = memory_view(report)
    assert view.row_count == len(report["roles"]) + 1
    assert "gradients and activations are not counted" in view.caption


def test_what_is_no_optimizer_is_named():
    with pytest.raises(TypeError, match="optimizer"):
        memory_report(optax.adam, {"w": jnp.ones((2, 2))})  # pyright: ignore


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "adam_learning_rate"])
def test_scale_refuses_numbers_that_are_not_finite(name, value):
    with pytest.raises(ValueError, match=name):
        scale(**{"learning_rate": 1e-3, name: value})
