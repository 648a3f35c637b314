r"""ReSpinQuant: rotations of its own for every half layer, fused into the weights.

A few channels of a language model's activations are far larger than the rest and take the whole range of a 4-bit grid.
A rotation spreads them. One for the whole model is free at run time (it fuses into the kernels) and weak; one for each
half layer is strong, but then the residual stream changes its basis at every skip:

$$x A_i \mapsto x M_i = (x A_i)\,T, \qquad T = A_i^T M_i \text{ (attention), } M_i^T A_{i+1} \text{ (perceptron)}$$

All bases start from one matrix and training moves them little, so T - I is nearly of low rank, and

$$T \approx I + Q M Q^T, \qquad Q: [D, r],\; M: [r, r]$$

is orthogonal and costs 2 D r + r^2 multiplications a token instead of D^2.

The heart: distinct bases for all half layers, fused exactly (in float64); one shared start; training with exact T, the
subspace afterwards. The rest is plumbing. `prepare` does all of it, the other functions are its parts:

    start = init_rotations(key, config)
    trained = train_rotations(params, start, batches, config, RotationTraining(steps=40))
    ready = rotate(params, config, trained.rotations, rank=32)

Things to know:

* Rotations trained with weights of 16 bits suit GPTQ. Rounding to nearest afterwards can lose what they gained; then
  train with the `weight_bits` that the model will have.
* The loss of a batch is noisy and a long step can end worse than it began: the best rotations on a fixed set are kept.
* The head is not rounded, so the basis before it has no gradient and stays at the start.
* What the down projection reads needs its own online Hadamard transform (`hadamard=True`).
* Memory of training: the parameters twice, the rotations four times, and the activations of one batch; where those are
  many (`RotationTraining.rematerialize`) they are computed twice, for a third more time.

Source: Kim, Wee, Kim, Hwang, Lee, Kwak, "ReSpinQuant", arXiv 2604.11080. No official code was found: the training
recipe is that of SpinQuant (arXiv 2405.16406) and its code, with exact Cayley steps, QR by count, and `eigh` in place
of the SVD, which gives the same subspace.

    >>> import jax
    >>> from effml.nn.transformer import TransformerConfig, init_params
    >>> config = TransformerConfig(64, 16, 1, 2, 32)
    >>> ready = prepare(init_params(jax.random.key(0), config), config, key=jax.random.key(1), kind="hadamard")
    >>> ready.params["layers"][0]["mlp"]["down"]["kernel"].shape
    (32, 16)
"""

from __future__ import annotations

from effml.quantize.respinquant._forward import RotationTraining, quantized_loss
from effml.quantize.respinquant._fusion import fold_norms, fuse_rotations, untie
from effml.quantize.respinquant._prepare import PreparedModel, attach_residuals, prepare, rotate
from effml.quantize.respinquant._residual import (
    ResidualSubspace,
    residual_macs,
    residual_rotate,
    residual_subspace,
)
from effml.quantize.respinquant._rotations import (
    ROTATION_KINDS,
    ModelSpec,
    RotationSet,
    init_rotations,
    transformer_spec,
    transitions,
)
from effml.quantize.respinquant._training import TrainedRotations, evaluate_rotations, train_rotations

__all__ = [
    "ROTATION_KINDS",
    "ModelSpec",
    "PreparedModel",
    "ResidualSubspace",
    "RotationSet",
    "RotationTraining",
    "TrainedRotations",
    "attach_residuals",
    "evaluate_rotations",
    "fold_norms",
    "fuse_rotations",
    "init_rotations",
    "prepare",
    "quantized_loss",
    "residual_macs",
    "residual_rotate",
    "residual_subspace",
    "rotate",
    "train_rotations",
    "transformer_spec",
    "transitions",
    "untie",
]
