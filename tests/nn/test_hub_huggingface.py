"""Hugging Face folders against `transformers` on torch: the same logits from the same files, in both directions."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.nn import hub
from effml.nn.cache import init_cache
from effml.nn.transformer import (
    RopeScaling,
    TransformerConfig,
    forward,
    forward_cached,
    init_params,
    stack_layers,
)

torch = pytest.importorskip(
    "torch", reason="the peer library torch is not installed: pip install 'effml[peers]'"
)
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'effml[peers]'"
)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "llama tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama biases, llama3 rope": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama linear rope": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
            "num_key_value_heads": 4,
        },
    ),
    "llama wide heads": ("Llama", {"head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}
TOKENS = np.random.default_rng(1).integers(0, 96, (2, 24)).astype(np.int32)

run = jax.jit(lambda params, tokens, config: forward(params, tokens, config).logits, static_argnames="config")
run_cached = jax.jit(forward_cached, static_argnames="config")


def peer(family, folder, dtype=torch.float32, **options):
    """A random model, saved by transformers; weights large enough for a wrong layout to show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def peer_logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


def assert_trees_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, peer("Llama", folder)


@pytest.fixture
def copy(llama, tmp_path):
    return shutil.copytree(llama[0], tmp_path / "copy")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_one_pass_and_token_by_token(case, tmp_path):
    family, options = CASES[case]
    expected = peer_logits(peer(family, tmp_path, **options))
    params, config, tokenizer, chat_template = hub.read_huggingface(tmp_path)
    assert (tokenizer, chat_template) == (None, None)
    np.testing.assert_allclose(run(params, TOKENS, config), expected, atol=1e-4, rtol=0)
    # Every case must be able to tell a wrong rotary layout from the right one.
    wrong = run(params, TOKENS, dataclasses.replace(config, rope_layout="interleaved"))
    assert np.abs(wrong - expected).max() > 0.05

    cache = init_cache(config, 2, 24)
    output, cache = run_cached(params, TOKENS[:, :9], cache, config=config)
    rows = [output.logits]
    for index in range(9, 24):
        output, cache = run_cached(params, TOKENS[:, index : index + 1], cache, config=config)
        rows.append(output.logits)
    np.testing.assert_allclose(np.concatenate(rows, axis=1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_widened_exactly(dtype, tmp_path):
    model = peer("Llama", tmp_path, dtype=dtype)
    params = hub.read_huggingface(tmp_path).params
    kernel = params["layers"][1]["mlp"]["down"]["kernel"]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(
        kernel, model.model.layers[1].mlp.down_proj.weight.detach().float().numpy().T
    )


def test_bfloat16_can_be_kept(tmp_path):
    peer("Llama", tmp_path, dtype=torch.bfloat16)
    params, config, *_ = hub.read_huggingface(tmp_path, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert (config.param_dtype, config.compute_dtype) == ("bfloat16", "bfloat16")
    with pytest.raises(ValueError, match="dtype='float16' is not known"):
        hub.read_huggingface(tmp_path, dtype="float16")  # pyright: ignore[reportArgumentType]


def test_shards_hold_the_same_model_as_one_file(llama, tmp_path):
    folder, model = llama
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_trees_equal(hub.read_huggingface(tmp_path).params, hub.read_huggingface(folder).params)
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-.*safetensors does not exist"):
        hub.read_huggingface(tmp_path)


def test_older_configs_with_rope_theta_and_rope_scaling_are_read():
    raw = {"model_type": "llama", **SIZES, "rope_theta": 500000.0, "num_key_value_heads": None}
    config = hub.config_from_huggingface(raw)
    assert (config.rope_base, config.rope_scaling, config.kv_heads, config.tied_head) == (
        500000.0,
        None,
        4,
        False,
    )
    scaling = {"type": "linear", "factor": 2.0}
    assert hub.config_from_huggingface(raw | {"rope_scaling": scaling}).rope_scaling == RopeScaling(
        "linear", 2.0
    )
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 32}
    assert hub.config_from_huggingface(raw | {"rope_scaling": scaling}).rope_scaling == RopeScaling(
        "llama3", 8.0, 1.0, 4.0, 32
    )


def test_defaults_of_silent_configs_are_those_of_transformers(tmp_path):
    silent = {
        key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "max_position_embeddings")
    }
    silent |= {"num_attention_heads": 32, "hidden_size": 64}
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        theirs = getattr(transformers, f"{family}Config")(**silent)
        ours = hub.config_from_huggingface({"model_type": family.lower(), **silent, "sliding_window": None})
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
        assert ours.max_length == theirs.max_position_embeddings
        assert ours.norm_epsilon == theirs.rms_norm_eps
        assert ours.rope_base == theirs.rope_parameters["rope_theta"]
        assert ours.tied_head == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gemma2"},
            r"model_type='gemma2' is not known \(allowed: llama, mistral, qwen2, qwen3\)",
        ),
        ({"model_type": None}, "model_type='None' is not known"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"hidden_size": "32"}, "hidden_size='32' must be an integer"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn' is not known"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "misses low_freq_factor, high_freq_factor",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window=16 is not supported"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "sliding_window=16 is not supported",
        ),
        ({"num_local_experts": 8}, r"num_local_experts=8 \(mixture of experts\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'"),
        ({"num_attention_heads": 5}, "must divide"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, the weights hold 2"),
    ],
)
def test_unsupported_configurations_are_named(copy, change, message):
    raw = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        hub.read_huggingface(copy)


def test_a_window_that_never_bites_is_accepted():
    raw = {**SIZES, "model_type": "mistral", "sliding_window": 64}
    assert hub.config_from_huggingface(raw).max_length == 64
    raw = {**SIZES, "model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}
    assert hub.config_from_huggingface(raw).qkv_bias


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight"),
        (
            lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(3)}),
            "unexpected .*0.extra.weight",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(47, 32)}),
            r"wrong shapes: model.layers.1.mlp.up_proj.weight is \(47, 32\), should be \(48, 32\)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}), "stored as I32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy, edit, message):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        hub.read_huggingface(copy)


@pytest.mark.parametrize("keep", [0, 5, 1000, -3])
def test_truncated_weights_are_one_clear_sentence(copy, keep):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"is not a whole safetensors file .*cut short or damaged") as caught:
        hub.read_huggingface(copy)
    assert "\n" not in str(caught.value)


def test_missing_or_damaged_files_are_named(copy, tmp_path):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model.safetensors .*pytorch_model.bin is not read"):
        hub.read_huggingface(copy)
    (copy / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match=r"config.json is not whole JSON"):
        hub.read_huggingface(copy)
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        hub.read_huggingface(tmp_path)


def bpe_backend():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    return backend


def test_tokenizer_template_and_stop_ids_come_with_the_folder(tmp_path):
    peer("Llama", tmp_path, vocab_size=300)
    backend = bpe_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": [{"name": "default", "template": "A"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    tokenizer, chat_template = hub.read_huggingface(tmp_path)[2:]
    assert chat_template == tokenizer.chat_template == "A"
    assert tokenizer.end_id == 1
    assert set(tokenizer.stop_ids) >= {0, 1}
    text = "the cat sat on the mat again<|im_end|>"
    assert tokenizer.encode(text).tolist() == bpe_backend().encode(text).ids
    (tmp_path / "chat_template.jinja").write_text("B")
    assert hub.read_huggingface(tmp_path).chat_template == "B"

    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text()[:400])
    with pytest.raises(ValueError, match=r"tokenizer.json is not a whole tokenizer"):
        hub.read_huggingface(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(copy):
    bpe_backend().save(str(copy / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has the id 2\d\d, the model knows 96 ids"):
        hub.read_huggingface(copy)


def random_params(config, *, scanned=False):
    """Every leaf random, biases and scales included; NumPy makes them quicker than compiling `init_params`."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config, scanned=scanned))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(
            (path[-1].key == "scale") + 0.2 * random.standard_normal(leaf.shape), leaf.dtype
        ),
        shapes,
    )


def tiny(**options):
    return TransformerConfig(
        **{**{"vocab_size": 96, "width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 48, "max_length": 64},
           "head_size": 8, "initializer_std": 0.2, **options}
    )  # fmt: skip


WRITTEN = {
    "llama": tiny(),
    "llama untied, biases": tiny(
        tied_head=False,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 16),
    ),
    "llama linear": tiny(
        rope_scaling=RopeScaling("linear", 2.0), head_size=12, norm_epsilon=1e-6, rope_base=5e5
    ),
    "qwen2": tiny(qkv_bias=True, tied_head=False),
    "qwen2 wide heads": tiny(qkv_bias=True, head_size=16),
    "qwen3": tiny(qk_norm=True, head_size=16),
    "qwen3 biases": tiny(qk_norm=True, qkv_bias=True, attention_output_bias=True),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_written_folders_give_the_same_logits_in_transformers_and_read_back_equal(case, tmp_path):
    config = WRITTEN[case]
    params = random_params(config)
    hub.write_huggingface(tmp_path / "model", params, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    np.testing.assert_allclose(run(params, TOKENS, config), peer_logits(model), atol=1e-4, rtol=0)
    again = hub.read_huggingface(tmp_path / "model")
    assert again.config == config
    assert_trees_equal(again.params, params)


def test_stacked_layers_and_bfloat16_are_written(tmp_path):
    config = tiny(param_dtype="bfloat16", compute_dtype="bfloat16")
    params = random_params(config)
    hub.write_huggingface(tmp_path / "model", stack_layers(params), config)
    again = hub.read_huggingface(tmp_path / "model", dtype="bfloat16")
    assert_trees_equal(again.params, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"qkv_bias": True}])
def test_interleaved_rotary_pairs_are_reordered(options, tmp_path):
    config = tiny(rope_layout="interleaved", **options)
    params = random_params(config)
    hub.write_huggingface(tmp_path / "model", params, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    np.testing.assert_allclose(run(params, TOKENS, config), peer_logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"positions": "learned"}, "positions='learned'"),
        ({"norm": "layer"}, "norm='layer'"),
        ({"mlp": "gelu"}, "mlp='gelu'"),
        ({"embedding_scale": 2.0}, "embedding_scale=2.0"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"attention_scale": 1.0}, "attention_scale=1.0"),
        ({"head_bias": True}, "head_bias=True"),
        ({"attention_output_bias": True}, "attention_output_bias=True"),
        ({"qk_norm": True, "qkv_bias": True}, "attention_output_bias=False in qwen3"),
        ({"qkv_bias": True, "mlp_bias": True}, "mlp_bias=True in qwen2"),
    ],
)
def test_what_hugging_face_has_no_place_for_is_named_and_nothing_is_written(options, name, tmp_path):
    config = tiny(**options)
    with pytest.raises(ValueError, match=f"have no place for.*{name}"):
        hub.write_huggingface(tmp_path / "model", random_params(config), config)
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_another_config_are_refused(tmp_path):
    params = random_params(tiny())
    with pytest.raises(ValueError, match=r"params: missing tensors: head.kernel"):
        hub.write_huggingface(tmp_path / "model", params, tiny(tied_head=False))
    params["extra"] = {"gate": jnp.zeros(3)}
    with pytest.raises(ValueError, match=r"unexpected tensors: extra.gate"):
        hub.write_huggingface(tmp_path / "model", params, tiny())


def test_files_of_others_are_never_overwritten(tmp_path):
    params = random_params(tiny())
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\)"):
        hub.write_huggingface(tmp_path, params, tiny())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    hub.write_huggingface(tmp_path / "model", params, tiny())
    hub.write_huggingface(tmp_path / "model", params, tiny(norm_epsilon=1e-3))
    assert hub.read_huggingface(tmp_path / "model").config.norm_epsilon == 1e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "thesis.tex"]


TEXT = "The café — 3 cats\n\tnaïve 日本 🙂" + "".join(map(chr, range(1, 0x180)))


def test_the_begin_of_text_token_of_a_folder_is_the_one_transformers_adds(tmp_path):
    from tokenizers import processors

    from effml.data import BpeTokenizer, encode_prompt

    backend = bpe_backend()
    name = backend.id_to_token(0)
    backend.post_processor = processors.TemplateProcessing(f"{name} $A", special_tokens=[(name, 0)])
    tokenizer = BpeTokenizer.from_tokenizer(backend, 1)
    config = tiny(vocab_size=300)
    hub.write_huggingface(tmp_path / "model", random_params(config), config, tokenizer)
    again = hub.read_huggingface(tmp_path / "model").tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.prefix_ids == (0,)
    assert encode_prompt(again, TEXT).tolist() == theirs(TEXT).input_ids


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_written_tokenizers_encode_alike_in_transformers_and_read_back(kind, tmp_path):
    from effml.data import BpeTokenizer, ByteTokenizer

    tokenizer = (
        ByteTokenizer()
        if kind == "bytes"
        else BpeTokenizer.from_tokenizer(bpe_backend(), 1, chat_template="{{ messages }}", stop_ids=[1, 0])
    )
    config = tiny(vocab_size=300)
    hub.write_huggingface(tmp_path / "model", random_params(config), config, tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer.encode(TEXT)
    assert theirs(TEXT, add_special_tokens=False).input_ids == ids.tolist()
    assert theirs.decode(ids) == TEXT
    assert theirs.eos_token_id == tokenizer.end_id
    assert theirs.chat_template == tokenizer.chat_template
    again = hub.read_huggingface(tmp_path / "model")
    assert again.tokenizer.encode(TEXT).tolist() == ids.tolist()
    assert again.tokenizer.end_id == tokenizer.end_id
    assert again.tokenizer.stop_ids == tokenizer.stop_ids
    assert again.chat_template == tokenizer.chat_template
