r"""The factorised linear layer in its three modes: dense, factors in training, and packed signs.

$$y = \bigl(((x \odot s_{in})\, V)\, U\bigr) \odot s_{out} + b, \qquad
  V \in \{-1,+1\}^{in \times r},\; U \in \{-1,+1\}^{r \times out}$$

While it is trained, V and U are the signs of real latents, and gradients pass through the signs as if they were not
there, with no clipping window. What is kept are the signs, one bit each, and two scales of 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from effml._validate import count, floating_dtype
from effml.nn.transformer import dense_linear
from pallas_kernels.binary_matmul import binary_matmul, pack_signs, unpack_signs

__all__ = [
    "DENSE",
    "FROZEN",
    "LATENT",
    "BinaryTensor",
    "NanoQuantLinear",
    "factor_linear",
    "moded_linear",
    "open_linear",
    "open_signs",
    "sign_ste",
]

DENSE, LATENT, FROZEN = 0, 1, 2
"""Modes of a linear in a block that is being reconstructed: its own kernel; factors in training; factors that rest."""


@jax.custom_jvp
def sign_ste(x: Array) -> Array:
    """The sign, +1 at zero, whose derivative is that of the identity everywhere.

    Example:
        >>> x = jnp.array([-3.0, 0.0, 0.5])
        >>> sign_ste(x).tolist(), jax.grad(lambda x: (2 * sign_ste(x)).sum())(x).tolist()
        ([-1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    """
    return jnp.where(x >= 0, 1, -1).astype(x.dtype)


@sign_ste.defjvp
def _sign_ste_tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return sign_ste(primals[0]), tangents[0]


def factor_linear(
    x: Float[Array, "*rows inputs"],
    v: Float[Array, "inputs rank"],
    u: Float[Array, "rank outputs"],
    scale_in: Float[Array, " inputs"],
    scale_out: Float[Array, " outputs"],
    bias: Float[Array, " outputs"] | None = None,
) -> Float[Array, "*rows outputs"]:
    """The layer with latent factors: their signs in the product, their gradients straight through.

    y = (((x * scale_in) @ sign(v)) @ sign(u)) * scale_out + bias

    Args:
        x: what the layer reads.
        v: latents; only signs count in the product.
        u: latents.
        scale_in: of every input.
        scale_out: of every output.
        bias: or None.

    Returns:
        In the dtype of `x`; sums are in float32.

    Example:
        >>> v, u = jnp.array([[0.1], [-7.0]]), jnp.array([[3.0, -0.2]])
        >>> factor_linear(jnp.array([2.0, 1.0]), v, u, jnp.ones(2), jnp.array([1.0, 10.0])).tolist()
        [1.0, -10.0]
    """
    h = _dot(x * scale_in.astype(x.dtype), sign_ste(v).astype(x.dtype))
    y = _dot(h.astype(x.dtype), sign_ste(u).astype(x.dtype)) * scale_out.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def _dot(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def moded_linear(x: Any, state: Mapping[str, Any], *, trained: str) -> Array:
    """A linear that carries kernel and factors and computes with those that its mode says.

    The mode is an array, so that a block whose layers change from dense to factors one by one is one program.

    Args:
        x: float32[..., in].
        state: `"kernel"` [in, out], `"v"` [in, rank], `"u"` [rank, out], `"scale_in"` [in], `"scale_out"` [out],
            perhaps `"bias"` [out], and `"mode"`, an int32 scalar: `DENSE`, `LATENT` or `FROZEN`. What rests in
            `FROZEN` has latents of +1 and -1.
        trained: which gradients are computed: "kernels" of dense layers, or "factors" of latent ones. All others
            are zero, but x's and the bias's are always there.

    Returns:
        float32[..., out].

    Example:
        >>> state = {"kernel": jnp.full((2, 1), 5.0), "v": jnp.ones((2, 1)), "u": -jnp.ones((1, 1))}
        >>> state |= {"scale_in": jnp.ones(2), "scale_out": jnp.ones(1)}
        >>> for mode in (DENSE, LATENT, FROZEN):
        ...     print(moded_linear(jnp.ones(2), {**state, "mode": jnp.int32(mode)}, trained="factors").tolist())
        [10.0]
        [-2.0]
        [-2.0]
    """
    rows = x.reshape(-1, x.shape[-1])
    parts = (state["kernel"], state["v"], state["u"], state["scale_in"], state["scale_out"])
    y: Any = _moded(trained, state["mode"], rows, *parts)
    y = y if "bias" not in state else y + state["bias"]
    return y.reshape(*x.shape[:-1], y.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moded(
    trained: str, mode: Array, x: Array, kernel: Array, v: Array, u: Array, scale_in: Array, scale_out: Array
) -> Array:
    return _moded_forward(trained, mode, x, kernel, v, u, scale_in, scale_out)[0]


def _moded_forward(trained: str, mode: Array, *arrays: Array) -> tuple[Array, Any]:
    del trained
    x, kernel, v, u, scale_in, scale_out = arrays
    rows = x.shape[0]

    def dense() -> tuple[Array, Array, Array]:
        nothing = [jnp.zeros((rows, part.shape[1]), jnp.float32) for part in (v, u)]
        return _dot(x, kernel), nothing[0], nothing[1]

    def factors() -> tuple[Array, Array, Array]:
        h = _dot(x * scale_in, sign_ste(v))
        product = _dot(h, sign_ste(u))
        return product * scale_out, h, product

    y, h, product = lax.cond(mode == DENSE, dense, factors)
    return y, (mode, arrays, h, product)


def _moded_backward(trained: str, saved: Any, dy: Array) -> tuple[Any, ...]:
    mode, (x, kernel, v, u, scale_in, scale_out), h, product = saved

    if trained == "kernels":

        def dense() -> tuple[Array, Array]:
            return _dot(dy, kernel.T), _outer(x, dy)

        def frozen() -> tuple[Array, Array]:
            dx = _dot(_dot(dy * scale_out, sign_ste(u).T), sign_ste(v).T) * scale_in
            return dx, jnp.zeros_like(kernel)

        dx, d_kernel = lax.cond(mode == DENSE, dense, frozen)
        return None, dx, d_kernel, None, None, None, None

    nothing = tuple(map(jnp.zeros_like, (v, u, scale_in, scale_out)))

    def resting_dense() -> tuple[Array, ...]:
        return _dot(dy, kernel.T), *nothing

    def latent() -> tuple[Array, ...]:
        dz = dy * scale_out
        dh = _dot(dz, sign_ste(u).T)
        dx = _dot(dh, sign_ste(v).T)
        return (
            dx * scale_in,
            _outer(x * scale_in, dh),
            _outer(h, dz),
            (dx * x).sum(0),
            (dy * product).sum(0),
        )

    def resting() -> tuple[Array, ...]:
        return _dot(_dot(dy * scale_out, sign_ste(u).T), sign_ste(v).T) * scale_in, *nothing

    dx, d_v, d_u, d_in, d_out = lax.switch(mode, (resting_dense, latent, resting))
    return None, dx, None, d_v, d_u, d_in, d_out


_moded.defvjp(_moded_forward, _moded_backward)


def _outer(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def open_signs(params: Mapping[str, Any], dtype: Any = jnp.float32) -> dict[str, Any]:
    """`{"binary": BinaryTensor}` with its signs as numbers, for `open_linear`; other parameters as they are.

    Args:
        params: of one linear.
        dtype: of the signs: float32, or int8 to keep them small.

    Returns:
        `{"v", "u", "scale_in", "scale_out"[, "bias"]}`, scales in float32.

    Example:
        >>> tensor = BinaryTensor.pack(np.ones((4, 2)), -np.ones((2, 5)), np.ones(4), np.ones(5))
        >>> sorted(open_signs({"binary": tensor}))
        ['scale_in', 'scale_out', 'u', 'v']
    """
    if "binary" not in params:
        return dict(params)
    tensor = params["binary"]
    v, u = tensor.signs(dtype)
    scales = {name: getattr(tensor, name).astype(jnp.float32) for name in ("scale_in", "scale_out")}
    rest = {name: value for name, value in params.items() if name != "binary"}
    return {"v": v, "u": u, **scales, **rest}


def open_linear(x: Array, params: Mapping[str, Any], name: str) -> Array:
    """The product with opened signs, or with a kernel where there is one; only scales and biases have gradients.

    Example:
        >>> tensor = BinaryTensor.pack(np.ones((1, 2)), np.ones((2, 1)), [0.5], [3.0])
        >>> open_linear(jnp.ones((1, 1)), open_signs({"binary": tensor}), "mlp.up").tolist()
        [[3.0]]
    """
    if "v" not in params:
        return dense_linear(x, params, name)
    v, u = (lax.stop_gradient(params[part].astype(x.dtype)) for part in ("v", "u"))
    h = _dot(x * params["scale_in"].astype(x.dtype), v)
    y = _dot(h.astype(x.dtype), u) * params["scale_out"].astype(jnp.float32)
    y = y + params["bias"].astype(jnp.float32) if "bias" in params else y
    return y.astype(x.dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["v_words", "u_words", "scale_in", "scale_out"],
    meta_fields=["inputs", "rank"],
)
@dataclass(frozen=True)
class BinaryTensor:
    """A kernel [in, out] as two matrices of signs and two scales: a pytree of four arrays.

    Attributes:
        v_words: uint32[ceil(in / 32), rank], `pallas_kernels.binary_matmul.pack_signs` of V along its inputs.
        u_words: uint32[ceil(rank / 32), out], of U along the rank.
        scale_in: bfloat16[in], or float32 while it is tuned.
        scale_out: bfloat16[out], likewise.
        inputs: how many inputs are real.
        rank: likewise.

    Example:
        >>> tensor = BinaryTensor.pack(np.ones((40, 8)), -np.ones((8, 3)), np.ones(40), np.full(3, 0.5))
        >>> tensor.shape, tensor.dense()[0].tolist(), tensor.bits_per_weight
        ((40, 3), [-4.0, -4.0, -4.0], 8.6)
    """

    v_words: Any
    u_words: Any
    scale_in: Any
    scale_out: Any
    inputs: int
    rank: int

    @classmethod
    def pack(cls, v: Any, u: Any, scale_in: Any, scale_out: Any, dtype: str = "bfloat16") -> BinaryTensor:
        """Packs the signs of factors; zero counts as +1.

        Args:
            v: [in, rank].
            u: [rank, out].
            scale_in: [in].
            scale_out: [out].
            dtype: of the scales that are kept.

        Raises:
            ValueError: for shapes that do not fit, anything that is not finite, or a type that does not hold scales.

        Example:
            >>> BinaryTensor.pack(np.ones((4, 2)), np.ones((3, 5)), np.ones(4), np.ones(5))
            Traceback (most recent call last):
            ...
            ValueError: factors of shapes (4, 2), (3, 5) with scales (4,), (5,) do not fit together
        """
        v, u, scale_in, scale_out = (np.asarray(one, np.float32) for one in (v, u, scale_in, scale_out))
        fits = v.ndim == u.ndim == 2 and v.shape[1] == u.shape[0] and 0 not in (*v.shape, *u.shape)
        if not fits or scale_in.shape != v.shape[:1] or scale_out.shape != u.shape[1:]:
            raise ValueError(
                f"factors of shapes {v.shape}, {u.shape} with scales {scale_in.shape}, {scale_out.shape} "
                "do not fit together"
            )
        if not all(np.isfinite(one).all() for one in (v, u, scale_in, scale_out)):
            raise ValueError("factors or scales are not finite")
        v, u = (np.where(one >= 0, np.int8(1), np.int8(-1)) for one in (v, u))
        kept = floating_dtype("dtype", dtype)
        scales = [jnp.asarray(one, kept) for one in (scale_in, scale_out)]
        if not all(bool(jnp.isfinite(one).all()) for one in scales):
            raise ValueError(f"scales are larger than {kept} holds")
        return cls(pack_signs(v), pack_signs(u), *scales, inputs=v.shape[0], rank=v.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """Of the kernel: [in, out].

        Example:
            >>> BinaryTensor.pack(np.ones((4, 2)), np.ones((2, 5)), np.ones(4), np.ones(5)).shape
            (4, 5)
        """
        return self.inputs, self.u_words.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes in a file: one bit a sign, each matrix filled up to whole bytes along the axis that is summed.

        Example:
            >>> BinaryTensor.pack(np.ones((8, 2)), np.ones((2, 5)), np.ones(8), np.ones(5)).nbytes
            33
        """
        inputs, outputs = self.shape
        signs = -(-inputs // 8) * self.rank + -(-self.rank // 8) * outputs
        return signs + sum(one.size * one.dtype.itemsize for one in (self.scale_in, self.scale_out))

    @property
    def bits_per_weight(self) -> float:
        """Counted from those bytes, scales among them.

        Example:
            >>> BinaryTensor.pack(np.ones((64, 16)), np.ones((16, 64)), np.ones(64), np.ones(64)).bits_per_weight
            1.0
        """
        return 8 * self.nbytes / (self.inputs * self.shape[1])

    def signs(self, dtype: Any = jnp.float32) -> tuple[Array, Array]:
        """V [in, rank] and U [rank, out] of +1 and -1; works under `jit`.

        Example:
            >>> tensor = BinaryTensor.pack(np.ones((4, 2)), -np.ones((2, 5)), np.ones(4), np.ones(5))
            >>> [one.shape for one in tensor.signs()]
            [(4, 2), (2, 5)]
        """
        v = unpack_signs(self.v_words, self.inputs, dtype=dtype)
        return v, unpack_signs(self.u_words, self.rank, dtype=dtype)

    def dense(self, dtype: Any = jnp.float32) -> Float[Array, "inputs outputs"]:
        """The kernel that the factors stand for; works under `jit`.

        Example:
            >>> BinaryTensor.pack(np.ones((1, 2)), np.ones((2, 1)), [0.5], [3.0]).dense().tolist()
            [[3.0]]
        """
        v, u = self.signs()
        product = jnp.matmul(v, u, precision=lax.Precision.HIGHEST)
        scaled = self.scale_in.astype(jnp.float32)[:, None] * product * self.scale_out.astype(jnp.float32)
        return scaled.astype(dtype)

    def __call__(self, x: Array, bias: Array | None = None, *, implementation: str | None = None) -> Array:
        """The packed product, `pallas_kernels.binary_matmul.binary_matmul`.

        Example:
            >>> tensor = BinaryTensor.pack(np.ones((1, 2)), np.ones((2, 1)), [0.5], [3.0])
            >>> tensor(jnp.ones((1, 1))).tolist()
            [[3.0]]
        """
        return binary_matmul(
            x,
            self.v_words,
            self.u_words,
            self.scale_in,
            self.scale_out,
            bias,
            implementation=implementation,
        )


class NanoQuantLinear(nnx.Module):
    """A linear of latent binary factors to train with, or of packed signs to run.

    Args:
        inputs: size of what it reads.
        features: size of what it gives.
        rank: of the factors.
        rngs: the `params` stream gives the latents.
        train_latents: False holds packed signs instead, which only a `BinaryTensor` sets (`load`).
        use_bias: whether it has a bias.
        dtype: of what is computed; sums are float32.

    Example:
        >>> layer = NanoQuantLinear(64, 32, 16, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((3, 64))
        >>> packed = layer.packed()
        >>> still = NanoQuantLinear(64, 32, 16, rngs=nnx.Rngs(0), train_latents=False)
        >>> still.load(packed)
        >>> layer(x).shape, bool(jnp.allclose(still(x), layer(x), rtol=1e-2))
        ((3, 32), True)
    """

    def __init__(
        self,
        inputs: int,
        features: int,
        rank: int,
        *,
        rngs: nnx.Rngs,
        train_latents: bool = True,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
    ) -> None:
        for name, value in (("inputs", inputs), ("features", features), ("rank", rank)):
            count(name, value)
        self.features, self.rank, self.dtype, self.train_latents = features, rank, dtype, train_latents
        v_key, u_key = jax.random.split(rngs.params())
        v, u = jax.random.normal(v_key, (inputs, rank)), jax.random.normal(u_key, (rank, features))
        self.scale_in = nnx.Param(jnp.full(inputs, (inputs * rank) ** -0.25))
        self.scale_out = nnx.Param(jnp.full(features, (inputs * rank) ** -0.25))
        self.bias = nnx.Param(jnp.zeros(features)) if use_bias else None
        if train_latents:
            self.v, self.u = nnx.Param(v), nnx.Param(u)
        else:
            self.words = nnx.Variable(BinaryTensor.pack(v, u, self.scale_in[...], self.scale_out[...]))

    def __call__(self, x: Array) -> Array:
        """[..., inputs] to [..., features] in `dtype`."""
        x = jnp.asarray(x, self.dtype)
        bias = None if self.bias is None else self.bias[...]
        if self.train_latents:
            scales = self.scale_in[...], self.scale_out[...]
            return factor_linear(x, self.v[...], self.u[...], *scales, bias)
        return self.words.get_value()(x, bias)

    def packed(self) -> BinaryTensor:
        """What it is when training has ended."""
        if not self.train_latents:
            return self.words.get_value()
        return BinaryTensor.pack(self.v[...], self.u[...], self.scale_in[...], self.scale_out[...])

    def load(self, tensor: BinaryTensor) -> None:
        """Takes packed signs and scales.

        Raises:
            ValueError: if the layer trains latents, or the tensor has other sizes.
        """
        if self.train_latents:
            raise ValueError("train_latents=True: packed signs have no latents to train")
        if (*tensor.shape, tensor.rank) != (*self.words.get_value().shape, self.rank):
            raise ValueError(
                f"a tensor of {tensor.shape} and rank {tensor.rank} does not fit this layer's "
                f"{self.words.get_value().shape} and rank {self.rank}"
            )
        self.words.set_value(tensor)
