"""What block-sparse attention refuses before anything is traced; its benchmark's byte model."""

import jax.numpy as jnp
import pytest

from pallas_kernels import block_sparse_attention as op

WRONG = {
    "q has 3 axes": ({"q": jnp.ones((1, 16, 4))}, ValueError, r"q of shape \(1, 16, 4\)"),
    "integers": ({"q": jnp.ones((1, 16, 4, 8), int)}, TypeError, "q holds int"),
    "types differ": ({"k": jnp.ones((1, 16, 2, 8), "bfloat16")}, TypeError, "k holds bfloat16"),
    "heads": ({"q": jnp.ones((1, 16, 3, 8))}, ValueError, "3 heads of q must be a multiple of the 2"),
    "dim": ({"q": jnp.ones((1, 16, 4, 7))}, ValueError, "first and last axes"),
    "values": ({"v": jnp.ones((1, 15, 2, 8))}, ValueError, "must agree but for the last axis"),
    "indices' shape": ({"indices": jnp.zeros((1, 16, 4, 1), int)}, ValueError, "must begin with"),
    "indices' type": ({"indices": jnp.zeros((1, 16, 2, 1))}, TypeError, "indices holds float32"),
    "index above": ({"indices": jnp.full((1, 16, 2, 1), 2)}, ValueError, "from 2 to 2 must be from -1 to 1"),
    "index below": ({"indices": jnp.full((1, 16, 2, 1), -2)}, ValueError, "from -2 to -2"),
    "block size": ({"block_size": 7}, ValueError, "block_size=7"),
    "block size's type": ({"block_size": 8.0}, ValueError, r"block_size=8\.0"),
    "positions": ({"positions": jnp.zeros((1, 15), int)}, ValueError, r"positions of shape \(1, 15\)"),
    "no positions": (
        {"k": jnp.ones((1, 9, 2, 8)), "v": jnp.ones((1, 9, 2, 8))},
        ValueError,
        "positions must be given",
    ),
    "segments": ({"segment_ids": jnp.zeros((2, 16), int)}, ValueError, "segment_ids of shape"),
    "lonely segments": ({"key_segment_ids": jnp.zeros((1, 16), int)}, ValueError, "without segment_ids"),
    "implementation": ({"implementation": "fast"}, ValueError, "implementation='fast'"),
    "kernel": (
        {"implementation": "pallas"},
        NotImplementedError,
        "pallas_gpu: no NVIDIA GPU.*pallas_tpu: no TPU",
    ),
    "triton": ({"implementation": "triton"}, NotImplementedError, "no 'triton' form"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_raises_before_tracing(name):
    changed, error, message = WRONG[name]
    good = {
        "q": jnp.ones((1, 16, 4, 8)),
        "k": jnp.ones((1, 16, 2, 8)),
        "v": jnp.ones((1, 16, 2, 8)),
        "indices": jnp.zeros((1, 16, 2, 1), int),
        "block_size": 8,
    }
    with pytest.raises(error, match=message):
        op.block_sparse_attention(**{**good, **changed})


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"blocks\.pairs=0"):
        op.BlockSizes(pairs=0)
    with pytest.raises(ValueError, match=r"blocks\.keys=24 must be a power of two"):
        op.BlockSizes(keys=24)


def test_byte_model_and_command_of_the_benchmark(capsys):
    from pallas_kernels.block_sparse_attention import bench

    # 64 tokens and 2 KV heads, each row with 16 chosen keys and values of 8 numbers, 4 query heads in all, float32.
    small = bench.Case(64, heads=4, kv_heads=2, dim=8, block_size=8, slots=2)
    query, chosen, index, keys = 64 * 4 * 8 * 4, 64 * 2 * 16 * 2 * 8 * 4, 64 * 2 * 2 * 4, 64 * 2 * 2 * 8 * 4
    moved = bench.bytes_moved(small)
    assert moved["forward"] == 2 * query + chosen + index
    assert moved["gradients"] == moved["forward"] + 4 * query + chosen + 2 * index + 2 * 2 * query + keys
    assert small.density == 16 / 64
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--preset", "gpu"])
    assert stopped.value.code == 2
    assert "needs a GPU" in capsys.readouterr().err
