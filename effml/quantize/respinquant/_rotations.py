"""Which rotations there are, where they sit in a model, and where they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from effml import linalg
from effml._validate import one_of
from effml.nn.transformer import TransformerConfig

__all__ = [
    "ROTATION_KINDS",
    "ModelSpec",
    "RotationSet",
    "init_rotations",
    "orthogonality",
    "transformer_spec",
    "transitions",
]

ROTATION_KINDS = {
    "none": "no rotation at all",
    "hadamard": "one fixed random-sign Hadamard matrix for all bases (QuaRot)",
    "global": "one learned matrix for all bases (SpinQuant)",
    "layerwise": "a learned matrix of its own for every half of every layer (ReSpinQuant)",
}

Path = tuple[str, ...]


@dataclass(frozen=True)
class ModelSpec:
    """Where a pre-norm transformer reads and writes its residual stream.

    Paths are keys into the parameters of one layer, or of the model for the last four. A reader's parameters are
    `{"kernel": [in, out]}`, perhaps with `"bias"`. `transformer_spec` makes the one of `effml.nn.transformer`.

    Attributes:
        width: size of the residual stream, D.
        num_layers: layers, L.
        num_heads: query heads.
        kv_heads: key and value heads, a divisor of `num_heads`.
        head_dim: size of a head, h.
        mlp_width: size of what the down projection reads.
        attention_norm: gain before attention.
        attention_readers: kernels that read the stream before attention, without the value projection.
        value: the value projection.
        attention_writer: the projection that writes the stream after attention.
        mlp_norm: gain before the perceptron.
        mlp_readers: kernels that read the stream before the perceptron.
        mlp_writer: the down projection.
        tables: what starts the stream: rows [.., width].
        final_norm: gain before the head.
        head: the head.
    """

    width: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    attention_norm: Path = ("attention_norm", "scale")
    attention_readers: tuple[Path, ...] = (("attention", "query"), ("attention", "key"))
    value: Path = ("attention", "value")
    attention_writer: Path = ("attention", "output")
    mlp_norm: Path = ("mlp_norm", "scale")
    mlp_readers: tuple[Path, ...] = (("mlp", "gate"), ("mlp", "up"))
    mlp_writer: Path = ("mlp", "down")
    tables: tuple[Path, ...] = (("embedding", "table"),)
    final_norm: Path = ("final_norm", "scale")
    head: Path = ("head",)

    def __post_init__(self) -> None:
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} must divide num_heads={self.num_heads}: every value head turns with one "
                "matrix, which the query heads that read it must undo"
            )


def transformer_spec(config: TransformerConfig) -> ModelSpec:
    """The spec of a model of `effml.nn.transformer`.

    Raises:
        ValueError: for a model whose norm subtracts a mean: rotations do not commute with that.

    Example:
        >>> transformer_spec(TransformerConfig(256, 32, 2, 4, 64, num_kv_heads=2)).kv_heads
        2
    """
    if config.norm != "rms":
        raise ValueError(
            f"norm={config.norm!r} subtracts the mean, which a rotation does not leave alone (allowed: rms)"
        )
    readers = (("mlp", "up"),) if config.mlp == "gelu" else (("mlp", "gate"), ("mlp", "up"))
    tables = (("embedding", "table"),)
    if config.positions == "learned":
        tables += (("positions", "table"),)
    return ModelSpec(
        width=config.width,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        mlp_width=config.mlp_width,
        mlp_readers=readers,
        tables=tables,
    )


class RotationSet(NamedTuple):
    """The learned rotations of a model; row vectors turn as x @ R.

    Attributes:
        a: [L + 1, D, D], basis of the stream before attention, and before the head.
        m: [L, D, D], basis of the stream before the perceptron.
        v: [L, h, h], basis of the values, the same for all heads of a layer.
    """

    a: Any
    m: Any
    v: Any


def init_rotations(
    key: Array, spec: ModelSpec | TransformerConfig, kind: str = "hadamard", *, shared: bool = True
) -> RotationSet:
    """Where training starts: the same matrix for all bases of the stream, so that every transition T is I.

    Args:
        key: for signs, and for the value rotations, which are one random-sign Hadamard matrix per layer.
        spec: of the model.
        kind: `hadamard` (one set of random signs for all), `walsh` (no signs, in the value rotations either),
            `orthogonal` (one random orthogonal matrix, of determinant 1), `identity`.
        shared: False draws every basis of the stream on its own. T - I then has full rank, no subspace of small rank
            holds it, and the method breaks: for tests of just that.

    Returns:
        Float32 rotations.

    Raises:
        ValueError: an unknown kind, or a width that has no Hadamard matrix here.

    Example:
        >>> import jax
        >>> start = init_rotations(jax.random.key(0), TransformerConfig(256, 32, 2, 4, 64))
        >>> start.a.shape, start.v.shape, bool((start.a[0] == start.m[1]).all())
        ((3, 32, 32), (2, 8, 8), True)
    """
    one_of("kind", kind, ("hadamard", "walsh", "orthogonal", "identity"))
    spec = spec if isinstance(spec, ModelSpec) else transformer_spec(spec)
    basis_key, value_key = jax.random.split(key)
    count = 2 * spec.num_layers + 1
    drawn = 1 if shared else count
    bases = jnp.stack([_matrix(k, spec.width, kind, True) for k in jax.random.split(basis_key, drawn)])
    bases = jnp.broadcast_to(bases, (count, spec.width, spec.width))
    values = jnp.stack(
        [_matrix(k, spec.head_dim, kind, False) for k in jax.random.split(value_key, spec.num_layers)]
    )
    return RotationSet(bases[: spec.num_layers + 1], bases[spec.num_layers + 1 :], values)


def _matrix(key: Array, size: int, kind: str, strict: bool) -> Array:
    if kind == "identity":
        return jnp.eye(size, dtype=jnp.float32)
    if kind == "orthogonal" or (not strict and linalg.hadamard_order(size) != size):
        q = np.linalg.qr(np.asarray(jax.random.normal(key, (size, size)), np.float64))[0]
        q[:, 0] *= np.sign(np.linalg.det(q))
        return jnp.asarray(q, jnp.float32)
    signs = None if kind == "walsh" else jax.random.rademacher(key, (size,), jnp.float32)
    return linalg.hadamard(size, signs=signs)


def transitions(rotations: RotationSet) -> tuple[np.ndarray, np.ndarray]:
    """What each skip must do to the stream: T = A_i^T M_i around attention, M_i^T A_(i+1) around the perceptron.

    Returns:
        Two float64[L, D, D].

    Example:
        >>> import jax
        >>> start = init_rotations(jax.random.key(0), TransformerConfig(256, 32, 2, 4, 64))
        >>> bool(abs(transitions(start)[0] - np.eye(32)).max() < 1e-6)
        True
    """
    a, m = np.asarray(rotations.a, np.float64), np.asarray(rotations.m, np.float64)
    return a[:-1].transpose(0, 2, 1) @ m, m.transpose(0, 2, 1) @ a[1:]


def orthogonality(matrix: Float[Array | np.ndarray, "*batch n n"]) -> float:
    """The largest entry of |R^T R - I| over all matrices, in float64.

    Example:
        >>> orthogonality(np.eye(3))
        0.0
    """
    wide = np.asarray(matrix, np.float64)
    return float(np.abs(np.swapaxes(wide, -1, -2) @ wide - np.eye(wide.shape[-1])).max(initial=0.0))
