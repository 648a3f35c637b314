"""NorMuon: Muon whose updates have the same size for every neuron.

Muon replaces the momentum of a matrix by its polar factor, so that no direction of it dominates. The rows of
an approximate polar factor still differ in size, and more so where a layer has more outputs than inputs: some
neurons move several times as far as others. NorMuon divides each neuron by the running root mean square of
its own update and then restores the size of the whole. For a kernel W [inputs, outputs], a neuron is a column:

    M <- b1 M + (1 - b1) G                              no bias correction
    O <- Newton-Schulz(M)                               close to the polar factor U V^T of M
    v <- b2 v + (1 - b2) mean over inputs of O^2        one number per output
    O' <- O / (sqrt(v) + eps)
    W <- W - lr (rms_target sqrt(inputs outputs) / ||O'||_F O' + weight_decay W)

so that the update has the root mean square `rms_target * lr` whatever the shape of W, and every neuron about
the same share of it. State: M, and one number per output; Adam keeps two copies of W.

The heart is the order (normalise after orthogonalising) and the axis (output neurons, in either layout; with
the wrong axis it still trains). Everything else is Muon.

Four variants are in circulation. The default is the paper's; the others are options of it, here with kernels
[inputs, outputs] and with their own rates, which are not rates for the default:

| variant | options beside the default |
|---|---|
| authors' file (`normuon.py`) | `nesterov=True, eps=1e-10, rescale="preserve", shape_scale="width"` |
| `dion` | `ns_coeffs="polar_express", rescale="preserve", shape_scale="spectral"` (or `"rms"`) |
| `modded-nanogpt` | `nesterov=True, ns_coeffs="polar_express", eps=0.0, rescale="preserve",` |
| | `shape_scale="width", neuron_axis="longer"` (its b2 is 0.9) |

`dion` sums gradients instead of averaging them, which Newton-Schulz can't tell apart. `modded-nanogpt` clamps v
at 1e-10, which matters only for neurons whose update is that close to zero.

Source: Li, Liu, Liang, Chen, Zhao, "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491,
algorithm 1 and section 3. The paper's eps is not stated in its text; 1e-8 is a reconstruction.

Things to know:

* A rate of plain Muon with `consistent_rms=0.2` carries over; rates of Muon in spectral units (0.02) do not.
* Weight decay is multiplied by `lr`, not by the shape-adjusted rate.
* A dead neuron (its gradient stays zero) is divided by a v near zero, so rounding noise can grow up to 1/eps
  times. `v_floor` bounds that: v is then at least `v_floor` times its mean over the layer's neurons.
* Zero gradients give zero updates, also in the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from effml import trees
from effml._validate import one_of
from effml.optimize._distribution import Distribution
from effml.optimize._layout import Specs
from effml.optimize._neuron_norm import NUMBERS, NorMuonState, check_recipe, scale_by_normuon
from effml.optimize._scale import _hold

__all__ = ["NORMUON_RULES", "NorMuonState", "normuon", "scale_by_normuon"]

NORMUON_RULES = {
    "matrix": "momentum, orthogonalised, normalised per output neuron",
    "embedding": "AdamW",
    "head": "AdamW",
    "vector": "Adam",
    "frozen": "not moved",
}


def normuon(
    learning_rate: optax.ScalarOrSchedule | Any,
    *,
    b1: Any = 0.95,
    b2: Any = 0.95,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | Any = None,
    adam_weight_decay: Any = 0.0,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.95,
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
    nesterov: bool = False,
    ns_coeffs: Any = "muon5",
    ns_dtype: Any = None,
    normalize: bool = True,
    rms_target: Any = 0.2,
    rescale: str = "rms",
    shape_scale: str | None = None,
    neuron_axis: str = "output",
    mu_dtype: Any = None,
    v_floor: Any = 0.0,
    weight_dimension_numbers: Specs = None,
    distribute: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon for hidden matrices; AdamW for embedding and head, Adam for vectors.

        matrices:    W <- W - lr (u + weight_decay W)                   u of `scale_by_normuon`
        the others:  W <- W - adam_lr (Adam's step + adam_weight_decay W)       no decay for vectors

    Embeddings and heads are told apart by name (`effml.trees.parameter_roles`), not by their number of axes:
    orthogonalising a lookup table harms it.

    Every number may be wrapped by `optax.inject_hyperparams(normuon)` and changed without compiling again;
    what is a function (`labels`, `weight_dimension_numbers`) or a dtype goes to its `static_args`.

    Args:
        learning_rate: step of the matrices: their updates have the root mean square 0.2 times this. The paper
            uses 4e-4 at 1.1B parameters and 3.6e-4 at 124M.
        b1: decay of the momentum.
        b2: decay of the neurons' mean squares.
        eps: as in `scale_by_normuon`.
        weight_decay: decoupled, of the matrices, multiplied by their rate (0.1 in the paper).
        adam_learning_rate: rate of embedding, head and vectors; None = `learning_rate`. Beside a schedule it
            must be a schedule too, normally of the same shape with its own peak.
        adam_weight_decay: decoupled decay of embedding and head (0 in the paper).
        adam_b1: Adam's decay of the first moment.
        adam_b2: Adam's decay of the second moment.
        labels: a tree of roles (see `effml.trees.parameter_roles`) or a function that makes one.
        nesterov: as in `scale_by_normuon`, and so are all that follow.
        ns_coeffs: coefficients of Newton-Schulz.
        ns_dtype: dtype of its products.
        normalize: False = Muon.
        rms_target: root mean square of a matrix's update, in units of its rate.
        rescale: `rms` or `preserve`.
        shape_scale: None, `width`, `spectral`, `rms`.
        neuron_axis: `output` or `longer`.
        mu_dtype: dtype of the momentum.
        v_floor: smallest share of the mean that a neuron is divided by.
        weight_dimension_numbers: input and output axes of the matrices. For parameters in torch's layout:
            `functools.partial(effml.trees.dimension_numbers, layout="torch")`.
        distribute: spread the orthogonalisation over a mesh.

    Returns:
        An optax transformation. Its `update` needs `params` when a weight decay is not 0.

    Raises:
        ValueError: bad numbers and options, at once; an unknown role or bad axes, at init.
        TypeError: a rate that is neither a number nor a schedule.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"up": {"kernel": jnp.eye(4, 8)}, "head": {"kernel": jnp.ones((8, 9))}}
        >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), normuon(1e-2, adam_learning_rate=1e-3))
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> round(float(abs(updates["head"]["kernel"]).max()), 6)
        0.001
    """
    adam_learning_rate = check_recipe(
        learning_rate, adam_learning_rate, weight_decay, adam_weight_decay, adam_b1=adam_b1, adam_b2=adam_b2
    )
    options: dict[str, Any] = {
        "nesterov": nesterov,
        "ns_coeffs": ns_coeffs,
        "ns_dtype": ns_dtype,
        "normalize": normalize,
        "rms_target": rms_target,
        "rescale": rescale,
        "shape_scale": shape_scale,
        "neuron_axis": neuron_axis,
        "mu_dtype": mu_dtype,
        "v_floor": v_floor,
        "distribute": distribute,
    }
    scale_by_normuon(b1, b2, eps, **options)  # complains before there are parameters

    def step(rate: Any, decay: Any, transform: optax.GradientTransformation) -> optax.GradientTransformation:
        none = isinstance(decay, NUMBERS) and decay == 0
        shrink = () if none else (optax.add_decayed_weights(decay),)
        return optax.chain(transform, *shrink, optax.scale_by_learning_rate(rate))

    def partition(params: PyTree) -> optax.GradientTransformationExtraArgs:
        roles = labels(params) if callable(labels) else labels
        if roles is None:
            roles = trees.parameter_roles(params)
        for role in set(jax.tree.leaves(roles)):
            one_of("labels", role, trees.ROLES)
        numbers = weight_dimension_numbers
        if numbers is None:
            numbers = trees.dimension_numbers(params, roles)
        elif callable(numbers):
            numbers = numbers(params)
        matrices = scale_by_normuon(b1, b2, eps, weight_dimension_numbers=numbers, **options)
        adam = optax.scale_by_adam(adam_b1, adam_b2, eps=1e-8)
        tables = step(adam_learning_rate, adam_weight_decay, adam)
        return optax.partition(
            {
                "matrix": step(learning_rate, weight_decay, matrices),
                "embedding": tables,
                "head": tables,
                "vector": step(adam_learning_rate, 0.0, adam),
                "frozen": _hold(),
            },
            roles,
        )

    def init(params: PyTree) -> optax.OptState:
        return partition(params).init(params)

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, optax.OptState]:
        # From the parameters where there are any: the gradient of an integer leaf has a type of its own.
        known = updates if params is None else params
        return partition(known).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)
