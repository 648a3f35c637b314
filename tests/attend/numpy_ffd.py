"""FFD in NumPy, block by block and query by query, float64 after the quantiser: an oracle that shares no code."""

import math

import ml_dtypes
import numpy as np


def quantized(k, bits, residual):
    """Codes, scales and float64 residuals of one block [rows, head], in the float32 steps of the definition."""
    z = np.float32((2**bits - 1) / 2)
    k = np.asarray(k, np.float32)
    scale = np.maximum(np.abs(k).max(0) / z, np.float32(1e-8))
    code = np.clip(np.round(k / scale + z), 0, 2 * z)
    rest = (k - (code - z) * scale).astype(residual)
    return code.astype(np.uint8), scale, rest.astype(np.float64)


def packed(code, bits):
    """Bytes of codes [rows, head], the first channel in the lowest bits."""
    out = np.zeros((code.shape[0], -(-code.shape[1] * bits // 8)), np.uint8)
    for channel in range(out.shape[1] * 8 // bits):
        filler = np.full(len(code), round((2**bits - 1) / 2), np.uint8)
        level = code[:, channel] if channel < code.shape[1] else filler
        out[:, channel * bits // 8] |= level << np.uint8(channel * bits % 8)
    return out


class Sequence:
    """One sequence and key head: rows as they came, and what a cache makes of them."""

    def __init__(self, keys, values, *, block, bits=2, sink=0, residual=ml_dtypes.float8_e4m3fn):
        self.block, self.bits, self.sink = block, bits, sink
        self.keys, self.values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
        count = max(len(keys) - sink, 0) // block
        spans = [slice(sink + n * block, sink + (n + 1) * block) for n in range(count)]
        self.spans = spans
        self.blocks = [quantized(self.keys[span], bits, residual) for span in spans]
        end = sink + count * block
        self.dense = np.r_[0 : min(sink, len(keys)), end : max(end, len(keys))].astype(int)

    def scan_keys(self, n):
        """Keys of a block by their codes alone."""
        code, scale, _ = self.blocks[n]
        z = (2**self.bits - 1) / 2
        return (code.astype(np.float64) - z) * scale.astype(np.float64)

    def stored_keys(self, n):
        """Keys of a block with residuals."""
        return self.scan_keys(n) + self.blocks[n][2]


def keeps(queries, sequence, extra_keys, delta, mode, scale):
    """Thresholds [group] and the kept blocks of one key head."""
    dense = np.concatenate([sequence.keys[sequence.dense], extra_keys])
    kept, thetas = [], []
    count = len(sequence.blocks)
    scan = [[scale * (sequence.scan_keys(n) @ q) for n in range(count)] for q in queries]
    stored = [[scale * (sequence.stored_keys(n) @ q) for n in range(count)] for q in queries]
    for g, q in enumerate(queries):
        of_dense = list(scale * (dense @ q))
        probes = {
            "pseudo": [scan[g][n].max() for n in ((0, count - 1) if count else ())],
            "pseudo_fp": [stored[g][n].max() for n in ((0, count - 1) if count else ())] + of_dense,
            "exact": [x.max() for x in stored[g]] + of_dense,
        }[mode]
        thetas.append((max(probes) if probes and count else -math.inf) - delta)
    for n in range(count):
        kept.append(any(scan[g][n].max() >= thetas[g] for g in range(len(queries))))
    return np.array(thetas), np.array(kept, bool)


def attention(queries, sequence, kept, extra_keys, extra_values, scale):
    """[group, value] attention of one key head's queries to kept blocks, dense rows and extra rows."""
    keys = [sequence.stored_keys(n) for n in np.flatnonzero(kept)]
    values = [sequence.values[sequence.spans[n]] for n in np.flatnonzero(kept)]
    keys = np.concatenate([*keys, sequence.keys[sequence.dense], extra_keys])
    values = np.concatenate([*values, sequence.values[sequence.dense], extra_values])
    return dense_attention(queries, keys, values, scale)


def dense_attention(queries, keys, values, scale):
    """[group, value] softmax attention; zeros where there is nothing to see."""
    if not len(keys):
        return np.zeros((len(queries), values.shape[-1]))
    scores = scale * (np.asarray(queries, np.float64) @ keys.T)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ values / weights.sum(-1, keepdims=True)
