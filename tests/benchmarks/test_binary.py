"""What the benchmarks of binary factors time is right: forms against float64, and a model of the planned ranks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import binary_decode, binary_forms, one_bit_memory
from effml import decode, trees
from effml.quantize import nanoquant
from pallas_kernels.binary_matmul import pack_signs


@pytest.mark.parametrize(("inputs", "rank", "outputs"), [(64, 32, 40), (37, 13, 5)])
def test_every_form_is_the_product_in_float64(inputs, rank, outputs):
    random = np.random.default_rng(inputs)
    v, u = random.choice([-1, 1], (inputs, rank)), random.choice([-1, 1], (rank, outputs))
    scale_in, scale_out = random.uniform(0.5, 2, inputs), random.uniform(0.5, 2, outputs)
    x = random.normal(size=(1, inputs))
    wanted = ((x * scale_in) @ v @ u) * scale_out
    words, scales = (
        (pack_signs(v), pack_signs(u)),
        [jnp.asarray(s, jnp.float32) for s in (scale_in, scale_out)],
    )
    packed = [binary_forms.sign_bytes(one) for one in words]
    kernel_of_bits = np.unpackbits(np.asarray(packed[0]), axis=0, bitorder="little")[:inputs]
    np.testing.assert_array_equal(1 - 2 * kernel_of_bits.astype(int), v)
    found = binary_forms.forms()
    assert {"native", "xla", "bytes", "unpack"} <= set(found)
    for name, (run, reads_bytes) in found.items():
        if name == "native":  # tests/kernels, where it can be built
            continue
        y = jax.jit(run)(jnp.asarray(x, jnp.float32), *(packed if reads_bytes else words), *scales)
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4, err_msg=name)


def test_the_timed_model_has_the_ranks_and_bytes_of_the_plan_and_writes():
    small = {
        "num_layers": 1,
        "vocab_size": 64,
        "width": 96,
        "mlp_width": 128,
        "num_heads": 3,
        "num_kv_heads": 1,
    }
    shapes = dataclasses.replace(binary_decode.SHAPES, **small)
    model = binary_decode.binary(2.0, "bfloat16", shapes)
    plan = nanoquant.plan(shapes, nanoquant.NanoQuantConfig(bits=2.0, keep_dtype="bfloat16"))
    assert dict(model.config.ranks) == plan.ranks
    assert trees.byte_count(model.params) == plan.packed_bytes + plan.kept_bytes
    made = decode.generate(model, np.ones((1, 3), np.int32), max_new_tokens=2)
    assert made.tokens.shape == (1, 2)


def test_peak_memory_is_that_of_the_child():
    small = one_bit_memory.peak_of(["-c", "pass"])["peak_bytes"]
    large = one_bit_memory.peak_of(["-c", "x = b'1' * (200 << 20)"])["peak_bytes"]
    assert 190 << 20 < large - small < 210 << 20
    with pytest.raises(RuntimeError, match="ended with 3"):
        one_bit_memory.peak_of(["-c", "raise SystemExit(3)"])
