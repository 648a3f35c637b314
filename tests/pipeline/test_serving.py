"""What the stage of serving counts and scores, against a forward pass over whole windows and a count block by block."""

import jax
import numpy as np
import pytest

from effml import data, models
from effml.attend import ffd, ssa
from effml.nn import transformer
from effml.pipeline import serving
from tests.quantize.small import quickly_compiled

CONFIG = ssa.SSATransformerConfig(
    transformer.TransformerConfig(256, 16, 2, 2, 24, max_length=128),
    ssa.SSAConfig(block_size=8, num_blocks=2),
)
WINDOWS = np.random.default_rng(0).integers(0, 256, (2, 34)).astype(np.int32)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "ssa"
    params = ssa.init_params(jax.random.key(0), CONFIG)
    # Larger weights than those of a fresh model, so that what is read matters.
    params["layers"] = jax.tree.map(lambda x: x * 5, params["layers"])
    models.save(folder, params, CONFIG, data.ByteTokenizer(), kind="ssa")
    return models.load(folder)


@pytest.mark.parametrize("mode", ssa.MODES)
def test_token_by_token_the_loss_is_that_of_the_whole_window(loaded, mode):
    with quickly_compiled():
        loss, choices, _ = serving._read(loaded, WINDOWS, ssa.decoding_options(CONFIG, mode=mode))
        wanted, _ = ssa.next_token_loss(loaded.params, {"tokens": WINDOWS}, CONFIG, mode=mode)
        logits = ssa.forward(loaded.params, WINDOWS[:, :-1], CONFIG, mode=mode).logits
    assert loss == pytest.approx(float(wanted), rel=1e-5)
    np.testing.assert_array_equal(choices, np.asarray(logits.argmax(-1)).T)


def test_a_two_bit_cache_that_reads_everything_keeps_everything(loaded):
    with quickly_compiled():
        options = ffd.decoding_options(delta=1e6, block=8)
        loss, _, (read, kept) = serving._read(loaded, WINDOWS, options)
        wanted, _ = ssa.next_token_loss(loaded.params, {"tokens": WINDOWS}, CONFIG)
    assert kept == 1
    assert loss == pytest.approx(float(wanted), abs=0.02)
    # A full block: codes of 2 bits, a scale for each feature, residuals of a byte (probed ones twice), values.
    block = 8 * 8 // 4 + 4 * 8 + 8 * 8 + 4 * 8 * 8
    each = [
        (p // 8) * block + min(p // 8, 2) * 8 * 8 + (p % 8) * 2 * 8 * 4 for p in range(WINDOWS.shape[1] - 1)
    ]
    assert read == pytest.approx(np.mean(each) * 2 * 2)


def test_bytes_are_those_of_the_blocks_that_are_read():
    length = 30
    read = kept = whole = 0.0
    for before in range(length):
        full = [block for block in range(100) if 8 * (block + 1) <= before]
        chosen = min(len(full), 1)  # of two blocks, one is the token's own
        rows = 8 * chosen + before - 8 * len(full)
        read += 2 * 2 * (rows * 2 * 8 * 4 + len(full) * 8 * 4)  # layers, heads, keys and values, sums
        whole += 2 * 2 * before * 2 * 8 * 4
        kept += chosen / len(full) if full else 1
    assert serving._bytes_read(CONFIG, length, sparse=True) == pytest.approx(read / length)
    assert serving._bytes_read(CONFIG, length) == pytest.approx(whole / length)
    assert serving._blocks_kept(CONFIG.attention, length) == pytest.approx(kept / length)
