"""`models.load` and `models.save`: every kind of source, whole folders only, and errors that help."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from effml import models
from effml.data import BpeTokenizer, ByteTokenizer
from effml.nn import hub
from effml.nn.hub import _files
from effml.nn.transformer import RopeScaling, TransformerConfig, forward, init_params, stack_layers

SIZES = {"vocab_size": 256, "width": 16, "num_layers": 2, "num_heads": 2, "mlp_width": 24, "max_length": 32}
TINY = TransformerConfig(**SIZES)
TOKENS = np.arange(12, dtype=np.int32)[None]
VARIANTS = {
    "llama": TINY,
    "gpt": TransformerConfig(
        **SIZES, norm="layer", positions="learned", mlp="gelu", qkv_bias=True, attention_output_bias=True,
        mlp_bias=True, head_bias=True, tied_head=False,
    ),
    "tied with head bias": TransformerConfig(**SIZES, head_bias=True, num_kv_heads=1, qk_norm=True),
    "scaled": TransformerConfig(
        **SIZES, rope_layout="interleaved", rope_scaling=RopeScaling("llama3", 2.0), attention_scale=0.1,
        embedding_scale=3.0, logit_scale=0.5,
    ),
    "bfloat16": TransformerConfig(**SIZES, param_dtype="bfloat16", compute_dtype="bfloat16"),
}  # fmt: skip


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


@pytest.fixture(scope="module")
def params():
    return random_params(TINY)


@pytest.fixture
def folder(params, tmp_path):
    models.save(tmp_path / "tiny", params, TINY, ByteTokenizer())
    return tmp_path / "tiny"


def assert_trees_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_saved_is_loaded(variant, scanned, tmp_path):
    config = VARIANTS[variant]
    params = random_params(config, scanned=scanned)
    models.save(tmp_path / "model", params, config, extra={"steps": 7})
    model = models.load(tmp_path / "model")
    assert (model.name, model.kind, model.config, model.extra) == ("model", "dense", config, {"steps": 7})
    assert (model.tokenizer, model.chat_template) == (None, None)
    assert_trees_equal(model.params, params)
    assert [leaf.dtype for leaf in jax.tree.leaves(model.params)] == [
        leaf.dtype for leaf in jax.tree.leaves(params)
    ]
    assert model.bytes_on_disk == (tmp_path / "model" / "model.safetensors").stat().st_size
    if variant == "scaled" and not scanned:  # much that only the configuration knows
        logits = model.forward(model.params, TOKENS, logits_for="last").logits
        np.testing.assert_array_equal(logits, forward(params, TOKENS, config, logits_for="last").logits)


def test_the_folder_is_what_the_documentation_says(folder):
    meta = json.loads((folder / "effml.json").read_text())
    assert (meta["format"], meta["kind"]) == (1, "dense")
    assert TransformerConfig.from_dict(meta["config"]) == TINY
    from safetensors.numpy import load_file

    assert load_file(folder / "model.safetensors")["layers.1.mlp.down.kernel"].shape == (24, 16)


def test_tokenizers_and_chat_templates_come_back(params, tmp_path):
    learned = BpeTokenizer.train(["to be or not to be"] * 20, vocab_size=256 + 8)
    config = TransformerConfig(**{**SIZES, "vocab_size": learned.vocab_size})
    models.save(tmp_path / "bpe", random_params(config), config, learned, "{{ messages }}")
    model = models.load(tmp_path / "bpe")
    assert model.tokenizer.encode("not to be").tolist() == learned.encode("not to be").tolist()
    assert model.chat_template == "{{ messages }}"
    own = BpeTokenizer.from_tokenizer(learned.tokenizer, 0, chat_template="own")
    models.save(tmp_path / "own", random_params(config), config, own)
    assert models.load(tmp_path / "own").chat_template == "own"


def test_foreign_folders_and_files_are_loaded(params, tmp_path):
    hub.write_huggingface(tmp_path / "foreign", params, TINY, ByteTokenizer())
    model = models.load(tmp_path / "foreign")
    assert (model.name, model.kind, model.source) == ("foreign", "dense", str(tmp_path / "foreign"))
    assert model.tokenizer.encode("né").tolist() == ByteTokenizer().encode("né").tolist()
    assert model.bytes_on_disk == (tmp_path / "foreign" / "model.safetensors").stat().st_size
    np.testing.assert_allclose(
        model.forward(model.params, TOKENS).logits, forward(params, TOKENS, TINY).logits, atol=1e-6
    )


def test_a_training_run_is_loaded_from_its_model_folder(params, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    models.save(tmp_path / "run" / "model", params, TINY)
    model = models.load(tmp_path / "run")
    assert model.name == "run"
    assert_trees_equal(model.params, params)


def test_dtype_casts_parameters_and_computation(folder):
    model = models.load(folder, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
    assert model.config.compute_dtype == "bfloat16"
    assert model.forward(model.params, TOKENS).hidden.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype='float16' is not known"):
        models.load(folder, dtype="float16")


# --- saving is all or nothing


def test_saving_again_replaces_the_model_and_leaves_nothing_behind(folder, params):
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    models.save(folder, doubled, TINY)  # without a tokenizer this time
    model = models.load(folder)
    assert_trees_equal(model.params, doubled)
    assert model.tokenizer is None
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_files_of_others_are_never_overwritten(folder, params, tmp_path):
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files \(notes.txt\)"):
        models.save(folder, params, TINY)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        models.save(tmp_path / "file", params, TINY)
    hub.write_huggingface(tmp_path / "foreign", params, TINY)
    with pytest.raises(ValueError, match="holds other files"):
        models.save(tmp_path / "foreign", params, TINY)
    assert (folder / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    models.load(folder)
    models.load(tmp_path / "foreign")


def test_a_failed_save_leaves_the_old_model_whole(folder, params, monkeypatch):
    def full_disk(path, tensors, metadata=None):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(_files, "write_safetensors", full_disk)
    with pytest.raises(OSError, match="no space left"):
        models.save(folder, jax.tree.map(jnp.zeros_like, params), TINY)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert_trees_equal(models.load(folder).params, params)


def test_a_save_killed_half_way_is_not_taken_for_a_model(folder, params):
    script = (
        "import os, sys, jax; from effml import models; from effml.nn.hub import _files\n"
        "from effml.nn.transformer import init_params\n"
        "model = models.load(sys.argv[1])\n"
        "_files.write_json = lambda path, content: os.kill(os.getpid(), 9)\n"
        "models.save(sys.argv[1], jax.tree.map(lambda leaf: 0 * leaf, model.params), model.config)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, check=False)
    assert done.returncode == -9
    assert_trees_equal(models.load(folder).params, params)
    with pytest.raises(ValueError, match="holds no model"):
        models.load(next(path for path in folder.parent.iterdir() if path.name != "tiny"))


def test_parameters_that_do_not_fit_are_refused_before_anything_is_written(params, tmp_path):
    other = TransformerConfig(**{**SIZES, "width": 32})
    with pytest.raises(ValueError, match=r"params: wrong shapes: .* is \(256, 16\), should be \(256, 32\)"):
        models.save(tmp_path / "model", params, other)
    with pytest.raises(ValueError, match="says 3 layers, the weights hold 2"):
        models.save(tmp_path / "model", params, TransformerConfig(**{**SIZES, "num_layers": 3}))
    with pytest.raises(ValueError, match="params: the parameters hold no 'layers'"):
        models.save(tmp_path / "model", {"embedding": params["embedding"]}, TINY)
    with pytest.raises(ValueError, match="kind='dens' is not known; did you mean 'dense'"):
        models.save(tmp_path / "model", params, TINY, kind="dens")
    assert list(tmp_path.iterdir()) == []


# --- errors of load


def test_unknown_names_suggest_the_nearest(folder, monkeypatch):
    with pytest.raises(ValueError, match="model='smollm' is not known; did you mean 'smollm2'"):
        models.load("smollm")
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ValueError, match="model='tiyn' is not known; did you mean 'tiny'"):
        models.load("tiyn")
    monkeypatch.chdir(folder.parent.parent)
    near = f"{folder.parent.name}/tinny"
    with pytest.raises(ValueError, match=f"did you mean '{folder.parent.name}/tiny'"):
        models.load(near)


def test_folders_and_files_without_a_model_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no model: neither effml.json .* nor config.json"):
        models.load(tmp_path)
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ValueError, match=r"is a file, but no .gguf file"):
        models.load(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"format=2 is not known \(this version reads 1\)"),
        ({"kind": "dence"}, r"kind in .*effml.json='dence' is not known; did you mean 'dense'"),
        ({"config": None}, "config must be an object"),
        (
            {"config": {**TINY.to_dict(), "widht": 3}},
            r"effml.json: .*'widht' is not known; did you mean 'width'",
        ),
        ({"config": {**TINY.to_dict(), "num_layers": 10**9}}, "says 1000000000 layers, the weights hold 2"),
        (
            {"config": {**TINY.to_dict(), "mlp_width": 25}},
            r"wrong shapes: layers.0.mlp.down.kernel is \(24, 16\)",
        ),
        ({"config": {**TINY.to_dict(), "tied_head": False}}, r"missing tensors: head.kernel"),
    ],
)
def test_descriptions_that_do_not_fit_the_weights_are_named(folder, change, message):
    path = folder / "effml.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        models.load(folder)


@pytest.mark.parametrize("name", ["effml.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [0, 30, -1])
def test_truncated_files_are_one_clear_sentence(folder, name, keep):
    content = (folder / name).read_bytes().rstrip()
    (folder / name).write_bytes(content[:keep])
    with pytest.raises(ValueError, match=f"{name} is not (a )?whole .*cut short") as caught:
        models.load(folder)
    assert "\n" not in str(caught.value)


def test_stacked_depth_that_does_not_fit_is_named(params, tmp_path):
    models.save(tmp_path / "model", stack_layers(params), TINY)
    path = tmp_path / "model" / "effml.json"
    path.write_text(path.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(ValueError, match=r"wrong shapes: .* is \(2, .*should be \(3, "):
        models.load(tmp_path / "model")


# --- other kinds, other places


def test_another_kind_of_folder_is_read_by_its_own_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "KINDS", dict(models.KINDS))

    def read(folder, meta):
        params, byte_count = models.read_tensors(folder)
        return models.LoadedModel(
            "",
            "coded",
            meta["config"],
            params,
            models.read_tokenizer(folder),
            None,
            print,
            byte_count,
            str(folder),
        )

    models.register_kind("coded", read)
    codes = {"codes": jnp.arange(6, dtype=jnp.uint8).reshape(2, 3), "scale": jnp.ones(2, jnp.float16)}
    models.save(tmp_path / "packed", {"layers": [codes]}, TINY, ByteTokenizer(), kind="coded")
    model = models.load(tmp_path / "packed")
    assert (model.name, model.kind, model.config["width"], model.tokenizer) == (
        "packed",
        "coded",
        16,
        ByteTokenizer(),
    )
    assert_trees_equal(model.params, {"layers": [codes]})
    assert model.params["layers"][0]["codes"].dtype == jnp.uint8


def test_hub_ids_are_fetched_where_the_network_allows(params, tmp_path, monkeypatch):
    import types

    hub.write_huggingface(tmp_path / "cached", params, TINY)
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, tuple(allow_patterns)))
        if name.startswith("offline"):
            raise ConnectionError("no route\nto host")
        return str(tmp_path / "cached")

    fake = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert models.load("org/tiny-model").name == "org/tiny-model"
    assert asked == [("org/tiny-model", ("*.json", "*.safetensors", "*.jinja"))]
    with pytest.raises(ValueError, match=r"model='offline/tiny' is no file or folder here, .* \(no route\)$"):
        models.load("offline/tiny")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        models.load("org/tiny-model")


def test_forward_of_a_loaded_model_is_jitted_once(folder):
    model = models.load(folder)
    assert isinstance(model.forward, functools.partial)
    step = jax.jit(model.forward)
    step(model.params, TOKENS)
    step(model.params, TOKENS + 1)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chat_template": 5}, r"effml.json: chat_template must be a text"),
        ({"extra": "x"}, r"effml.json: extra must be an object"),
    ],
)
def test_descriptions_of_a_wrong_type_are_named(folder, change, message):
    path = folder / "effml.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        models.load(folder)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_])
def test_weights_that_are_no_floating_point_numbers_are_refused(folder, dtype):
    """A header that says I32 where F32 was meant would give text, and wrong text."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].astype(dtype)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} holds {np.dtype(dtype)}, should hold floating point"):
        models.load(folder)


def test_tensors_that_lie_below_another_are_refused():
    from effml.nn.hub import _names

    for order in (["layers", "layers.0.scale"], ["layers.0.scale", "layers"]):
        with pytest.raises(ValueError, match="layers"):
            _names.unflatten({name: np.ones(1) for name in order})


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_the_form_for_decoding_computes_the_same(params, scanned, tmp_path):
    models.save(tmp_path / "m", stack_layers(params) if scanned else params, TINY)
    model = models.load(str(tmp_path / "m"))
    quick = model.for_decoding()
    assert "query_key_value" in quick.params["layers"][0]["attention"]
    assert "linear" in quick.forward.keywords
    for tokens in (jnp.array([[3]]), jnp.arange(20)[None]):
        expected = model.forward(model.params, tokens).logits
        np.testing.assert_allclose(quick.forward(quick.params, tokens).logits, expected, atol=2e-5)
    mine = dataclasses.replace(model, forward=functools.partial(model.forward, linear=print))
    assert mine.for_decoding().forward.keywords["linear"] is print
