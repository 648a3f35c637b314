r"""FFD: decoding that reads a 2-bit thumbnail of every key, and the rest of only those blocks that matter.

Full blocks of keys are stored as codes of 2 (or 4) bits and residuals of 8. One kernel scores a block by its codes, and
only if its best score comes within δ nats of the largest probed one does it load residuals and values, and reuse the
scores it has. Nothing is trained, and how much is read follows from how sharp each head's attention is: a head that
spreads its attention evenly reads everything.

`QuantizedKV` is the cache, `append` and `prefill` fill it, `ffd_attention` reads it, `kept_mass` tells what it left
out, and `decoding_options` hands all of it to generation:

    >>> import functools, types, jax, numpy as np
    >>> from effml import decode, nn
    >>> from effml.attend import ffd
    >>> config = nn.TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
    >>> model = types.SimpleNamespace(
    ...     config=config,
    ...     params=nn.transformer.init_params(jax.random.key(0), config),
    ...     forward=functools.partial(nn.transformer.forward, config=config),
    ... )
    >>> prompt = np.array([[1, 2, 3]])
    >>> arguments = ffd.decoding_options(delta=5, block=16)
    >>> decode.generate(model, prompt, max_new_tokens=4, **arguments).tokens.shape
    (1, 4)

Source: Liu et al., "Faster Than Flash: Exploiting Attention Sparsity for Efficient Long-Context Decoding", ICML 2026,
arXiv 2609.00097. Theirs are the layout, the quantiser, the rule and the kernel; ours are δ in nats throughout, the
probe that reads residuals (`pseudo_fp`), `certified`, sinks in full precision, and rows that are not committed.
"""

from __future__ import annotations

from effml.attend.ffd._attention import bytes_read, ffd_attention, kept_mass
from effml.attend.ffd._cache import QuantizedKV, append, init_cache, prefill, room_in_block, stored_rows
from effml.attend.ffd._decoding import FFDAttention, FFDCaches, FFDConfig, decoding_options
from effml.attend.ffd._module import FFDSelfAttention
from pallas_kernels.ffd_decode import (
    FFDStats,
    delta_from_ratio,
    dequantize,
    merge_partials,
    quantize_block,
)

__all__ = [
    "FFDAttention",
    "FFDCaches",
    "FFDConfig",
    "FFDSelfAttention",
    "FFDStats",
    "QuantizedKV",
    "append",
    "bytes_read",
    "decoding_options",
    "delta_from_ratio",
    "dequantize",
    "ffd_attention",
    "init_cache",
    "kept_mass",
    "merge_partials",
    "prefill",
    "quantize_block",
    "room_in_block",
    "stored_rows",
]
