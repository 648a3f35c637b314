"""Slow, literal forms of SSA in float64, written from its definition and from nothing of the library."""

import numpy as np


def select(q, k, block_size, num_blocks):
    """Chosen blocks of one sequence, as `[length][kv_heads]` sets: token by token, block by block."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    length, heads, head = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    chosen = []
    for t in range(length):
        own = t // block_size
        row = []
        for h in range(kv_heads):
            importance = {}
            complete = [n for n in range(own + 1) if (n + 1) * block_size <= t + 1]
            for n in range(own):
                importance[n] = 0.0
                for g in range(group):
                    a = {
                        m: q[t, h * group + g]
                        @ k[m * block_size : (m + 1) * block_size, h].mean(0)
                        / np.sqrt(head)
                        for m in complete
                    }
                    top = max(a.values())
                    total = sum(np.exp(value - top) for value in a.values())
                    importance[n] += np.exp(a[n] - top) / total
            importance[own] = np.inf
            best = sorted(importance, key=lambda n: (-importance[n], n))[:num_blocks]
            row.append(set(best))
        chosen.append(row)
    return chosen


def attend(q, k, v, blocks, block_size):
    """Attention of one sequence to chosen blocks (None is all), `[length, heads, head]`."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    length, heads, head = q.shape
    group = heads // k.shape[1]
    out = np.zeros((length, heads, v.shape[-1]))
    for t in range(length):
        for h in range(heads):
            kv = h // group
            seen = [s for s in range(t + 1) if blocks is None or s // block_size in blocks[t][kv]]
            scores = k[seen, kv] @ q[t, h] / np.sqrt(head)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[seen, kv] / weights.sum()
    return out


def as_sets(indices):
    """`[length][kv_heads]` sets of an index array `[length, kv_heads, blocks]` without the -1."""
    return [[{int(n) for n in head if n >= 0} for head in token] for token in np.asarray(indices)]
