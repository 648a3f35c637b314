"""The transformer as a Flax NNX module: a thin shell over the pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from effml.nn import transformer
from effml.nn._config import TransformerConfig

__all__ = ["Transformer"]


class Transformer(nnx.Module):
    """A decoder-only language model whose weights are `nnx.Param` variables.

    The variables sit at the paths that the plain parameters have, below `weights`. The module is a pytree, so
    `jax.jit` and `jax.grad` take it directly; in a training loop prefer the functions of
    `effml.nn.transformer` over `model.params()`, which cost less per call than `nnx.jit`.

    Args:
        config: sizes and variants.
        rngs: the `params` stream gives the key of the initial weights.
        scanned: whether the layers are stacked on a leading axis.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> model = Transformer(config, rngs=nnx.Rngs(0))
        >>> model(np.array([[1, 2, 3]])).logits.shape
        (1, 3, 256)
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, scanned: bool = False) -> None:
        self.config = config
        self.weights = _wrap(transformer.init_params(rngs.params(), config, scanned=scanned))

    def __call__(
        self, tokens: Int[Array | np.ndarray, "batch length"] | None = None, **kwargs: Any
    ) -> transformer.ForwardOutput:
        """Runs `effml.nn.transformer.forward`; the keyword arguments are the same.

        Args:
            tokens: ids, or None with `embeddings=`.
            **kwargs: as for `effml.nn.transformer.forward`.

        Returns:
            A `ForwardOutput`.
        """
        return transformer.forward(self.params(), tokens, self.config, **kwargs)

    def params(self) -> dict[str, Any]:
        """The weights as the plain dict that the functions take; no copies are made.

        Example:
            >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
            >>> sorted(Transformer(config, rngs=nnx.Rngs(0)).params())
            ['embedding', 'final_norm', 'layers']
        """
        return _unwrap(self.weights)

    @classmethod
    def from_params(cls, params: Mapping[str, Any], config: TransformerConfig) -> Transformer:
        """A module that holds the given weights.

        Args:
            params: from `init_params`, `nn.hub` or a checkpoint; layers scanned or unrolled.
            config: the model's configuration.

        Example:
            >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
            >>> import jax
            >>> params = transformer.init_params(jax.random.key(0), config)
            >>> model = Transformer.from_params(params, config)
            >>> model.params()["embedding"]["table"] is params["embedding"]["table"]
            True
        """
        model = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))  # shapes only: nothing is initialised
        model.weights = _wrap(params)
        return model


def _wrap(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return nnx.Dict({name: _wrap(value) for name, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return nnx.List([_wrap(value) for value in tree])
    return nnx.Param(tree)


def _unwrap(tree: Any) -> Any:
    if isinstance(tree, nnx.Variable):
        return tree.get_value()
    if isinstance(tree, Mapping):
        return {name: _unwrap(value) for name, value in tree.items()}
    return [_unwrap(value) for value in tree]
