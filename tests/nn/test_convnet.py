"""The convolutional nets against the same nets written with flax.linen layers."""

from __future__ import annotations

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.nn.convnet import (
    ResNetConfig,
    SmallCnnConfig,
    convolve,
    init_resnet,
    init_small_cnn,
    init_state,
    resnet_forward,
    small_cnn_forward,
)

NORMS = ("group", "batch", "channel", "none")
IMAGES = np.random.default_rng(0).normal(size=(3, 12, 10, 3)).astype(np.float32)
jitted_cnn = jax.jit(small_cnn_forward, static_argnames=("config", "training"))
jitted_resnet = jax.jit(resnet_forward, static_argnames=("config", "training"))


def randomized(tree, seed=0):
    """Every leaf random; variances (named so) positive."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        value = rng.normal(0, 0.4, leaf.shape)
        name = path[-1].key
        return jnp.asarray(np.exp(value) if name == "variance" else value + (name == "scale"), jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, tree)


class Peer(linen.Module):
    """Either net, with linen's layers; units and heads are named as ours are."""

    config: SmallCnnConfig | ResNetConfig

    @linen.compact
    def __call__(self, x, training):
        config = self.config

        def unit(x, name, channels, stride=1):
            bias = config.norm == "none"
            x = linen.Conv(channels, (3, 3), stride, padding=1, use_bias=bias, name=f"{name}/conv")(x)
            if config.norm == "group":
                return linen.GroupNorm(config.groups, epsilon=config.norm_epsilon, name=f"{name}/norm")(x)
            if config.norm == "channel":
                return linen.LayerNorm(epsilon=config.norm_epsilon, name=f"{name}/norm")(x)
            if config.norm == "batch":
                return linen.BatchNorm(
                    not training,
                    momentum=config.batch_momentum,
                    epsilon=config.norm_epsilon,
                    name=f"{name}/norm",
                )(x)
            return x

        if isinstance(config, SmallCnnConfig):
            for index, channels in enumerate(config.channels):
                x = linen.relu(unit(x, f"layers.{index}", channels))
                x = linen.max_pool(x, (2, 2), (2, 2))
        else:
            x = linen.relu(unit(x, "stem", config.width))
            for index in range(3 * config.blocks):
                channels = config.width * 2 ** (index // config.blocks)
                halve = index in (config.blocks, 2 * config.blocks)
                y = linen.relu(unit(x, f"blocks.{index}.first", channels, 2 if halve else 1))
                y = unit(y, f"blocks.{index}.second", channels)
                if halve:
                    side = jnp.zeros((*x[:, ::2, ::2].shape[:3], channels // 4))
                    x = jnp.concatenate([side, x[:, ::2, ::2], side], axis=-1)
                x = linen.relu(x + y)
        return linen.Dense(config.num_classes, name="head")(x.mean((1, 2)))


def peer_variables(params, state):
    units = {}
    if "layers" in params:
        units = {f"layers.{index}": unit for index, unit in enumerate(params["layers"])}
    else:
        units = {"stem": params["stem"]}
        for index, pair in enumerate(params["blocks"]):
            units |= {f"blocks.{index}.{name}": pair[name] for name in ("first", "second")}
    weights = {"head": params["head"]}
    for name, unit in units.items():
        weights[f"{name}/conv"] = unit["convolution"]
        if "norm" in unit:
            weights[f"{name}/norm"] = unit["norm"]
    statistics = {f"{name}/norm": {"mean": s["mean"], "var": s["variance"]} for name, s in state.items()}
    return {"params": weights, "batch_stats": statistics}


CASES = {
    "small": (SmallCnnConfig, {"channels": (8, 16), "groups": 4}, init_small_cnn, jitted_cnn),
    "resnet": (ResNetConfig, {"width": 8, "blocks": 2, "groups": 4}, init_resnet, jitted_resnet),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("net", CASES)
def test_logits_and_state_are_those_of_linen(net, norm, training):
    make, sizes, init, run = CASES[net]
    config = make(norm=norm, num_classes=5, **sizes)
    params = randomized(jax.eval_shape(lambda: init(jax.random.key(0), config)))
    state = randomized(init_state(config))
    logits, new_state = run(params, IMAGES, config, state=state, training=training)
    peer = jax.jit(lambda v, x: Peer(config).apply(v, x, training, mutable=["batch_stats"]))
    expected, updated = peer(peer_variables(params, state), IMAGES)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=2e-4)
    expected_state = peer_variables(params, new_state)["batch_stats"]
    if norm == "batch":
        chex.assert_trees_all_close(updated["batch_stats"], expected_state, atol=1e-4, rtol=1e-4)
        moved = jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), state, new_state))
        assert all(moved) if training else not any(moved)
    else:
        assert new_state == {}


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_is_the_loop_over_pixels(stride):
    rng = np.random.default_rng(3)
    x, kernel, bias = rng.normal(size=(1, 6, 5, 2)), rng.normal(size=(3, 3, 2, 4)), rng.normal(size=4)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = -(-6 // stride), -(-5 // stride)
    expected = np.zeros((1, rows, columns, 4))
    for row in range(rows):
        for column in range(columns):
            patch = padded[0, stride * row : stride * row + 3, stride * column : stride * column + 3]
            expected[0, row, column] = np.einsum("hwi,hwio->o", patch, kernel) + bias
    params = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    got = convolve(jnp.asarray(x, jnp.float32), params, "", stride)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_resnet_20_has_the_papers_parameter_count():
    shapes = jax.eval_shape(lambda: init_resnet(jax.random.key(0), ResNetConfig()))
    kernels = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == kernels + norms + 64 * 10 + 10 == 269_722
    assert ResNetConfig().depth == 20


def test_gradient_step_lowers_the_loss_and_compiles_once():
    config = ResNetConfig(width=8, blocks=1)
    params, state = init_resnet(jax.random.key(0), config), init_state(config)
    labels = jnp.array([0, 1, 2])

    @jax.jit
    @chex.assert_max_traces(1)
    def step(params, state):
        def loss(params):
            logits, new = resnet_forward(params, IMAGES, config, state=state, training=True)
            return -jax.nn.log_softmax(logits)[jnp.arange(3), labels].mean(), new

        (value, new), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient), new, value

    params, state, first = step(params, state)
    for _ in range(5):
        params, state, last = step(params, state)
    assert float(last) < 0.8 * float(first)


def test_seams_see_every_product_by_name():
    config = ResNetConfig(width=8, blocks=1, norm="group")
    params, seen = init_resnet(jax.random.key(0), config), []

    def convolution(x, unit, name, stride):
        seen.append((name, stride))
        return convolve(x, unit, name, stride)

    def linear(x, head, name):
        seen.append((name, None))
        return x @ head["kernel"]

    jax.eval_shape(
        lambda p: resnet_forward(p, jnp.ones((1, 8, 8, 3)), config, convolution=convolution, linear=linear),
        params,
    )
    blocks = [
        (f"blocks.{i}.{n}", 2 if i and n == "first" else 1) for i in range(3) for n in ("first", "second")
    ]
    assert seen == [("stem", 1), *blocks, ("head", None)]


def test_bfloat16_images_give_logits_near_float32():
    config = SmallCnnConfig(channels=(8, 16))
    params = init_small_cnn(jax.random.key(0), config)
    wide, _ = jitted_cnn(params, IMAGES, config)
    narrow, _ = jitted_cnn(params, jnp.asarray(IMAGES, jnp.bfloat16), config)
    assert narrow.dtype == jnp.float32
    assert float(jnp.abs(narrow - wide).max() / jnp.abs(wide).max()) < 0.05


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SmallCnnConfig(norm="grup"), "did you mean 'group'"),
        (lambda: SmallCnnConfig(channels=(12,), groups=8), "groups=8"),
        (lambda: SmallCnnConfig(channels=()), "channels"),
        (lambda: ResNetConfig(width=0), "channels=0"),
        (lambda: ResNetConfig(blocks=0), "blocks=0"),
        (lambda: ResNetConfig(batch_momentum=1.0), "batch_momentum"),
    ],
)
def test_bad_configurations_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_bad_images_and_missing_state_are_named():
    config = SmallCnnConfig(channels=(8, 16), norm="batch")
    params = init_small_cnn(jax.random.key(0), config)
    with pytest.raises(ValueError, match="init_state"):
        small_cnn_forward(params, jnp.ones((1, 8, 8, 3)), config)
    with pytest.raises(ValueError, match="in_channels=3"):
        small_cnn_forward(params, jnp.ones((1, 8, 8, 1)), config, state=init_state(config))
    with pytest.raises(ValueError, match="smaller than 4x4"):
        small_cnn_forward(params, jnp.ones((1, 8, 3, 3)), config, state=init_state(config))
