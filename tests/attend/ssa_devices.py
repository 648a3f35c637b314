"""SSA on eight devices against one, printed as JSON; run in a process of its own, which has eight devices.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.attend.ssa_devices
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from effml.attend import ssa
from effml.nn import transformer

MODEL = transformer.TransformerConfig(
    vocab_size=31, width=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=24, initializer_std=0.3
)
CONFIG = ssa.SSATransformerConfig(MODEL, ssa.SSAConfig(block_size=8, num_blocks=2))
LENGTH = 36  # the last block is not full


def farthest(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b)).max()) for a, b in pairs)


def collectives(compiled):
    return sorted(set(re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())))


def of_model():
    """Loss, metrics and gradient of a step whose rows are spread, in whichever mode its key draws."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    params = ssa.init_params(jax.random.key(0), CONFIG)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 31, (8, LENGTH + 1)).astype(np.int32),
        "weights": rng.integers(0, 2, (8, LENGTH)).astype(np.float32),
    }
    spread = jax.device_put(batch, NamedSharding(mesh, P("data")))
    everywhere = jax.device_put(params, NamedSharding(mesh, P()))

    def loss(params, batch, key):
        return ssa.training_loss(params, batch, CONFIG, step_key=key)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    rows = []
    for seed in range(4):
        one, many = run(params, batch, jax.random.key(seed)), run(everywhere, spread, jax.random.key(seed))
        (_, metrics), gradient = one
        largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
        rows.append(
            {"sparse": float(metrics["sparse"]), "difference": farthest(one, many), "gradient": largest}
        )
    return rows


def of_heads(mode):
    """Output, alignment and gradient of the attention whose rows and heads are spread, left to XLA and mapped."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "heads"))
    rows = P("data", None, "heads")
    keys = jax.random.split(jax.random.key(1), 5)
    shape = lambda heads: (4, LENGTH, heads, 8)
    query = jax.random.normal(keys[0], shape(6))
    key, value = (jax.random.normal(k, shape(2)) for k in keys[1:3])
    gate = jax.nn.sigmoid(jax.random.normal(keys[3], (4, LENGTH, 6)))
    weights = jax.random.normal(keys[4], shape(6))
    arguments = (query, key, value, gate)
    spread = [jax.device_put(x, NamedSharding(mesh, rows)) for x in arguments]
    attention = functools.partial(ssa.ssa_attention, config=CONFIG.attention, mode=mode)

    def train(*arguments):
        output, align, streams = attention(*arguments, train=True)
        return output, align[None], streams.indices

    def mapped(function, outputs):
        return jax.shard_map(function, mesh=mesh, in_specs=(rows,) * 4, out_specs=outputs, check_vma=False)

    def differentiated(train):
        def loss(arguments):
            output, align, indices = train(*arguments)
            return (output * weights).sum() + 10 * align.mean(), (output, align.mean(), indices)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    one = differentiated(train)(arguments)
    of_parts = (rows, P(("data", "heads")), rows)  # equal parts: the mean of their means is the mean
    serve = jax.jit(mapped(lambda *rows: attention(*rows)[0], rows))
    return {
        "partitioned": farthest(one, differentiated(train)(spread)),
        "mapped": farthest(one, differentiated(mapped(train, of_parts))(spread)),
        "served": farthest(one[0][1][0], serve(*spread)),
        "collectives": collectives(serve.lower(*spread).compile()),
    }


if __name__ == "__main__":
    assert len(jax.devices()) == 8, jax.devices()
    print(json.dumps({"model": of_model(), **{mode: of_heads(mode) for mode in ("full", "sparse")}}))
