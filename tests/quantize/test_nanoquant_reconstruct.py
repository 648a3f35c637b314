"""One block: what its tuning minimises, in which order it works, and that it compiles twice and not once a layer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml.quantize import nanoquant
from effml.quantize.nanoquant import _reconstruct

WIDTH, HIDDEN, WINDOWS, LENGTH = 16, 24, 6, 5
PLAN = {"up": 16, "inner.mix": 24, "down": 16}


def apply(params, x, linear):
    hidden = linear(jnp.tanh(x), params["up"], "up")
    hidden = hidden + linear(jnp.sin(hidden), params["inner"]["mix"], "inner.mix")
    return params["gain"] * x + linear(jax.nn.relu(hidden), params["down"], "down")


def dense(x, params, name):
    return x @ params["kernel"] + params.get("bias", 0.0)


@pytest.fixture(scope="module")
def block():
    noise = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "mix": (HIDDEN, HIDDEN), "down": (HIDDEN, WIDTH)}
    made = {
        name: {"kernel": jnp.asarray(noise.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)}
        for name, shape in shapes.items()
    }
    made["up"]["bias"] = jnp.asarray(noise.normal(size=HIDDEN), jnp.float32)
    return {"gain": jnp.float32(0.5), "inner": {"mix": made.pop("mix")}, **made}


@pytest.fixture(scope="module")
def data(block):
    noise = np.random.default_rng(1)
    x = jnp.asarray(noise.normal(size=(WINDOWS, LENGTH, WIDTH)), jnp.float32)
    x_q = x + jnp.asarray(0.1 * noise.normal(size=x.shape), jnp.float32)
    sizes = {"up": (WIDTH, HIDDEN), "inner.mix": (HIDDEN, HIDDEN), "down": (HIDDEN, WIDTH)}
    stats = {name: tuple(noise.uniform(0.5, 2.0, one) for one in pair) for name, pair in sizes.items()}
    return x_q, apply(block, x, dense), stats


def quick(key, kernel, in_sq, out_sq, rank):
    """Signs of the best real factors, in NumPy: no initialiser has to be compiled."""
    kernel = np.nan_to_num(np.asarray(kernel), posinf=0, neginf=0)
    left, values, right = np.linalg.svd(kernel, full_matrices=False)
    v, u = left[:, :rank] * np.sqrt(values[:rank]), np.sqrt(values[:rank, None]) * right[:rank]
    s_in, s_out, zero = np.abs(v).mean(1), np.abs(u).mean(0), np.zeros(())
    made = s_in[:, None] * (np.sign(v) @ np.sign(u)) * s_out
    return nanoquant.BinaryFactors(
        v, u, s_in, s_out * np.vdot(made, kernel) / max(np.vdot(made, made), 1e-30), zero, zero
    )


def run(block, data, tuning, block_apply=apply, plan=PLAN, **options):
    x_q, target, stats = data
    options = {"factorise": quick, "key": jax.random.key(0), **options}
    return nanoquant.reconstruct_block(block_apply, block, x_q, target, stats, plan, tuning, **options)


def weighted_loss(params, data):
    """Mean weighted squared error in float64, from the packed signs and nothing of the training code."""
    x_q, target, stats = data

    def linear(x, part, name):
        kernel = part["binary"].dense() if "binary" in part else part["kernel"]
        return x @ kernel + part.get("bias", 0.0)

    weights = stats["down"][1] / stats["down"][1].mean()
    wrong = np.asarray(apply(params, x_q, linear) - target, np.float64)
    return float((weights * wrong**2).mean())


TUNING = nanoquant.BlockTuning.adam(
    WINDOWS, dense_rate=3e-3, factor_rate=3e-3, dense_epochs=6, factor_epochs=6, dense_batch=4
)


def test_each_kind_of_tuning_lowers_the_loss(block, data):
    """Kernels make up for a factorised linear before them; factors do for all that rests."""
    x_q, target, stats = data
    weights = jnp.asarray(stats["down"][1] / stats["down"][1].mean(), jnp.float32)
    state = _reconstruct._Block.of(block, PLAN)

    def now():
        # Linears that are frozen or latent count with their signs.
        made = state.packed(block)
        for name in ("up", "inner.mix"):
            if int(state.modes[name]) == _reconstruct.DENSE:
                part = {key: state.linears[name][key] for key in block["up"] if key in state.linears[name]}
                made = {**made, "up": part} if name == "up" else {**made, "inner": {"mix": part}}
        made = {**made, "down": {"kernel": state.linears["down"]["kernel"]}}
        return weighted_loss(made, data)

    def tune(kind, optimizer, batch):
        orders = _reconstruct._orders(jax.random.key(1), WINDOWS, 6, batch)
        return state.tune(kind, apply, optimizer, x_q, target, weights, orders)

    state.install("up", quick(None, block["up"]["kernel"], *stats["up"], 16))
    losses = [now()]
    reported = tune("factors", TUNING.factor, 1)
    losses.append(now())
    assert reported == pytest.approx(losses[-1], rel=0.1), "what it reports is what it is"
    state.freeze("up")
    assert now() == pytest.approx(losses[-1], rel=0.02), "scales of 16 bits"
    tune("kernels", TUNING.dense, 4)
    losses.append(now())
    assert losses[0] > 1.05 * losses[1] > 1.1 * losses[2]


def test_the_whole_block_is_better_with_tuned_factors(block, data):
    losses = []
    for epochs in (0, 6):
        tuning = nanoquant.BlockTuning.adam(WINDOWS, factor_rate=3e-3, dense_epochs=0, factor_epochs=epochs)
        made, rows = run(block, data, tuning)
        losses.append(weighted_loss(made, data))
        assert [row["name"] for row in rows] == list(PLAN)
        assert all("loss_dense" not in row and ("loss_factors" in row) == (epochs > 0) for row in rows)
        assert made["gain"] is block["gain"]
    assert losses[0] > 1.1 * losses[1]


def test_a_block_compiles_twice_and_the_next_one_not_at_all(block, data):
    # One trace for kernels, one for factors, whatever the number of linears and blocks.
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(apply, n=2)
    run(block, data, TUNING, counted)
    other = jax.tree.map(lambda leaf: 1.1 * leaf, block)
    run(other, data, TUNING, counted)
    with pytest.raises(AssertionError, match="traced > 2 times"):
        run(block, tuple(one[:, :4] if not isinstance(one, dict) else one for one in data), TUNING, counted)


def test_only_what_its_turn_it_is_moves(block, data):
    """A chain that moves everything it is given shows what tuning lets move."""
    push = optax.GradientTransformation(
        lambda _: (), lambda g, s, p=None: (jax.tree.map(jnp.ones_like, g), s)
    )
    state = _reconstruct._Block.of(block, PLAN)
    x_q, target, _ = data
    weights = jnp.ones(WIDTH)
    kernel = state.linears["up"]["kernel"]
    state.install("up", quick(jax.random.key(0), kernel, jnp.ones(WIDTH), jnp.ones(HIDDEN), 16))
    state.freeze("up")
    before = jax.tree.map(np.asarray, state.linears)
    order = [jnp.arange(WINDOWS)[:, None]]
    state.tune("kernels", apply, push, x_q, target, weights, iter(order))
    for name, own in state.linears.items():
        for part, value in own.items():
            moved = WINDOWS if name != "up" and part in ("kernel", "bias") else 0
            np.testing.assert_allclose(value, before[name][part] + moved, rtol=1e-5, atol=1e-5)
    kernel = state.linears["down"]["kernel"]
    state.install("down", quick(jax.random.key(0), kernel, jnp.ones(HIDDEN), jnp.ones(WIDTH), 16))
    before = jax.tree.map(np.asarray, state.linears)
    state.tune("factors", apply, push, x_q, target, weights, iter(order))
    for name, own in state.linears.items():
        for part, value in own.items():
            moved = WINDOWS if name == "down" and part != "kernel" else 0
            np.testing.assert_allclose(value, before[name][part] + moved, rtol=1e-5, atol=1e-5)


def test_the_same_key_gives_the_same_bits(block, data):
    first, second = run(block, data, TUNING)[0], run(block, data, TUNING)[0]
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_importance_decides_what_is_kept(block, data):
    """Outputs without weight may go wrong; without tuning it has nothing to decide."""
    x_q, target, _ = data
    found = []
    for heavy in (slice(0, 8), slice(8, 16)):
        importance = np.full(WIDTH, 1e-3)
        importance[heavy] = 1.0
        made, _ = run(block, data, TUNING, importance=importance)
        linear = lambda x, part, name: x @ part["binary"].dense() + part.get("bias", 0.0)
        found.append(np.square(np.asarray(apply(made, x_q, linear) - target)).mean((0, 1)))
    assert found[0][:8].mean() < 0.8 * found[1][:8].mean()
    assert found[1][8:].mean() < 0.8 * found[0][8:].mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": {}}, "plan is empty"),
        ({"plan": {"middle": 8}}, "no linear 'middle'"),
        ({"plan": {"up": 17}}, "up: rank=17 must be at most 16"),
        ({"plan": {"up": 8, "down": 8}, "stats": {"up": (np.ones(16), np.ones(24))}}, "stats lack 'down'"),
        ({"plan": {"up": 8}, "stats": {"up": (np.ones(3), np.ones(24))}}, "up: stats of shapes"),
        ({"x": jnp.ones((0, 5, WIDTH))}, "none of them 0"),
        ({"importance": np.ones(3)}, r"importance of shape \(3,\)"),
    ],
)
def test_bad_input_is_named(block, data, change, message):
    x_q, target, stats = data
    change = dict(change)
    inputs = (change.pop("x", x_q), target, change.pop("stats", stats))
    with pytest.raises(ValueError, match=message):
        run(block, inputs, TUNING, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": 0}, "windows=0 must be above 0"),
        ({"dense_batch": 0}, "dense_batch=0 must be above 0"),
        ({"factor_epochs": -1}, "factor_epochs=-1 must be above 0"),
        ({"dense_rate": -1e-3}, "dense_rate=-0.001 must be above 0"),
    ],
)
def test_bad_tuning_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        nanoquant.BlockTuning.adam(**{"windows": WINDOWS, **change})


def test_a_rate_that_blows_up_is_said(block, data):
    tuning = nanoquant.BlockTuning.adam(WINDOWS, dense_rate=1e30, dense_epochs=6, factor_epochs=0)
    with pytest.raises(ValueError, match="not finite"):
        run(block, data, tuning)
