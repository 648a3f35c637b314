"""`effml generate --decoder esp`: the text of the other decoders, what it saved, and a stop in mid-stream."""

import json

import jax
import jax.numpy as jnp
import pytest

from effml import models
from effml.cli import main
from effml.data import ByteTokenizer
from effml.decode import esp
from effml.nn.transformer import TransformerConfig, init_params


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = TransformerConfig(256, 16, 1, 2, 24, initializer_std=0.4)
    models.save(folder, init_params(jax.random.key(0), config), config, ByteTokenizer())
    return str(folder)


def test_the_text_is_that_of_the_other_decoders(model, capsys):
    words = ["generate", model, "--prompt", "def f", "--max-new-tokens", "24"]
    assert main([*words, "--decoder", "greedy"]) == 0
    plain = capsys.readouterr().out
    for options in (
        ["--widths", "5", "--repeats"],
        ["--masks", "2", "--block-complexity", "12", "--mask-init", "zero"],
    ):
        assert main([*words, "--decoder", "esp", *options]) == 0
        found = capsys.readouterr()
        assert found.out == plain
        assert "tokens a pass" in found.err
        assert "% of calls saved" in found.err
    drawn = ["--temperature", "0.9", "--top-k", "9", "--seed", "3"]
    assert main([*words, "--decoder", "sample", *drawn]) == 0
    sampled = capsys.readouterr().out
    assert sampled != plain
    assert main([*words, "--decoder", "esp", "--widths", "5", *drawn]) == 0
    assert capsys.readouterr().out == sampled


def test_a_run_of_one_token_is_drafted_with_repeats_alone(tmp_path, capsys):
    """Of tokens with one embedding follows one token for ever; without repeats no candidate can be it."""
    config = TransformerConfig(256, 16, 1, 2, 24, tied_head=False)
    params = init_params(jax.random.key(0), config)
    table = params["embedding"]["table"]
    params["embedding"]["table"] = jnp.broadcast_to(table[:1], table.shape)
    models.save(tmp_path / "one", params, config, ByteTokenizer())
    words = ["generate", str(tmp_path / "one"), "--prompt", "a", "--max-new-tokens", "9", "--decoder", "esp"]
    for options, saved in ([], "1.00 tokens a pass"), (["--repeats"], "2.00 tokens a pass"):
        assert main([*words, "--widths", "3", *options]) == 0
        assert saved in capsys.readouterr().err


def test_many_prompts_are_answered_in_one_batch(model, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo and more\n")
    words = ["generate", model, "--prompts", str(prompts), "--max-new-tokens", "9"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--decoder", "esp", "--widths", "5"]) == 0
    found = capsys.readouterr()
    assert [json.loads(line) for line in found.out.splitlines()] == [
        json.loads(line) for line in plain.splitlines()
    ]
    assert "calls saved" in found.err


def test_a_cache_of_low_bit_keys_serves_both_decoders(model, tmp_path, capsys):
    words = ["generate", model, "--prompt", "def f", "--max-new-tokens", "24", "--cache", "ffd"]
    assert main([*words, "--delta", "2", "--cache-block", "8"]) == 0
    plain = capsys.readouterr().out
    assert len(plain) > len("def f")
    assert main([*words, "--delta", "2", "--cache-block", "8", "--decoder", "esp", "--widths", "5"]) == 0
    assert capsys.readouterr().out == plain
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo and more\n")
    assert (
        main(["generate", model, "--prompts", str(prompts), "--max-new-tokens", "4", "--cache", "ffd"]) == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_stop_in_mid_stream_keeps_the_text(model, capsys, monkeypatch):
    whole = esp.stream_text

    def stopped(*args, **kwargs):
        stream = whole(*args, **{**kwargs, "chunk": 1})

        def some():
            for index, item in enumerate(stream):
                if index == 4:
                    raise KeyboardInterrupt
                yield item

        return esp.ESPStream(some(), stream._run)

    monkeypatch.setattr(esp, "stream_text", stopped)
    words = [
        "generate",
        model,
        "--prompt",
        "abc",
        "--max-new-tokens",
        "24",
        "--decoder",
        "esp",
        "--widths",
        "5",
    ]
    assert main(words) == 130
    found = capsys.readouterr()
    assert found.out.startswith("abc")
    assert len(found.out) > 4
    assert "tokens a pass" in found.err
    assert "interrupted" in found.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--widths", "5"], "--widths needs --decoder esp"),
        (["--strict"], "--strict needs --decoder esp"),
        (["--repeats"], "--repeats needs --decoder esp"),
        (["--decoder", "esp", "--widths"], "--widths needs the number of candidates"),
        (["--decoder", "esp", "--top-k", "3"], "need a --temperature"),
        (["--decoder", "esp", "--widths", "5", "--block-complexity", "9"], "exclude each other"),
        (["--decoder", "esp", "--masks", "1", "--widths", "5", "2"], "2 depths, but num_masks=1"),
        (["--decoder", "esp", "--mask-init", "men"], "did you mean 'mean'"),
        (["--decoder", "esb"], "did you mean 'esp'"),
    ],
)
def test_options_that_make_no_sense_are_named(model, words, named, capsys):
    assert main(["generate", model, "--prompt", "a", *words]) == 2
    assert named in capsys.readouterr().err
