"""`effml generate --attention-mode sparse`: the text that a model's sparse forward pass predicts, without a cache."""

import jax
import jax.numpy as jnp
import pytest

from effml import models
from effml.attend import ssa
from effml.cli import main
from effml.data import ByteTokenizer
from effml.nn.transformer import TransformerConfig, init_params

PROMPT = "def function(of_some, words):"
NEW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = ssa.SSATransformerConfig(
        TransformerConfig(256, 16, 1, 2, 24, initializer_std=0.4), ssa.SSAConfig(block_size=8, num_blocks=2)
    )
    models.save(folder, ssa.init_params(jax.random.key(0), config), config, ByteTokenizer(), kind="ssa")
    return str(folder)


def predicted(model, num_blocks):
    """The likeliest tokens, each from a forward pass over all tokens before it."""
    loaded = models.load(model)
    tokenizer = loaded.tokenizer
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(PROMPT)]
    length = len(ids) + NEW
    forward = jax.jit(
        lambda tokens: (
            ssa.forward(loaded.params, tokens, loaded.config, mode="sparse", num_blocks=num_blocks).logits
        )
    )
    new = []
    while len(new) < NEW:
        seen = ids + new
        padded = jnp.array([seen + [0] * (length - len(seen))])
        token = int(forward(padded)[0, len(seen) - 1].argmax())
        if token in tokenizer.stop_ids:
            break
        new.append(token)
    return tokenizer.decode(new)


def test_the_text_is_that_of_the_sparse_forward_pass(model, capsys):
    words = ["generate", model, "--prompt", PROMPT, "--max-new-tokens", str(NEW)]

    def text(*more):
        assert main([*words, *more]) == 0
        return capsys.readouterr().out.removesuffix("\n").removeprefix(PROMPT)

    full = text()
    assert full == text("--attention-mode", "full")
    # As many blocks as there are: nothing is left out.
    assert full == text("--attention-mode", "sparse", "--num-blocks", "8")
    own, one = text("--attention-mode", "sparse"), text("--attention-mode", "sparse", "--num-blocks", "1")
    assert own == predicted(model, 2)
    assert one == predicted(model, 1)
    assert len({full, own, one}) == 3


def test_the_share_of_blocks_that_were_read_is_said(model, tmp_path, capsys):
    tokenizer = models.load(model).tokenizer
    prompt = len(tokenizer.prefix_ids) + len(tokenizer.encode(PROMPT))
    words = [
        "generate",
        model,
        "--max-new-tokens",
        str(NEW),
        "--attention-mode",
        "sparse",
        "--num-blocks",
        "1",
    ]
    assert main([*words, "--prompt", PROMPT]) == 0
    said = capsys.readouterr().err
    written = int(said.split("[")[-1].split()[0])
    # Token after token: one block is read of those that hold the token or one before it.
    shares = [1 / ((prompt + step) // 8 + 1) for step in range(written - 1)]
    assert f", {sum(shares) / len(shares):.0%} of the cache's blocks read]" in said
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT + "\n")
    assert main([*words, "--prompts", str(prompts)]) == 0
    assert f", {sum(shares) / len(shares):.0%} of the cache's blocks read]" in capsys.readouterr().err
    assert main(["generate", model, "--max-new-tokens", "4", "--prompt", PROMPT]) == 0
    assert "blocks read" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--num-blocks", "2"], "--num-blocks needs --attention-mode sparse"),
        (["--attention-mode", "spare"], "did you mean 'sparse'"),
        (["--attention-mode", "sparse", "--num-blocks", "0"], "num_blocks=0"),
        (["--attention-mode", "sparse", "--decoder", "esp"], "--decoder esp and --attention-mode sparse"),
        (["--attention-mode", "sparse", "--cache", "ffd"], "exclude each other"),
    ],
)
def test_options_that_make_no_sense_are_named(model, words, named, capsys):
    assert main(["generate", model, "--prompt", "a", *words]) == 2
    assert named in capsys.readouterr().err


def test_a_model_without_ssa_is_refused(tmp_path, capsys):
    config = TransformerConfig(256, 16, 1, 2, 24)
    models.save(tmp_path / "plain", init_params(jax.random.key(0), config), config, ByteTokenizer())
    words = ["generate", str(tmp_path / "plain"), "--prompt", "a", "--attention-mode", "sparse"]
    assert main(words) == 2
    assert "needs a model trained with SSA" in capsys.readouterr().err
