"""Training with SSA: the loss, its one draw, its indices under recomputation, and runs from the command line on."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effml import cli, models, train
from effml.attend import ssa
from effml.nn import transformer
from effml.pipeline import TrainConfig, train_model
from effml.pipeline.training import read_config

SIZES = transformer.TransformerConfig(
    vocab_size=31, width=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=24, initializer_std=0.3
)
CONFIG = ssa.SSATransformerConfig(SIZES, ssa.SSAConfig(block_size=8, num_blocks=1))


@functools.cache
def params():
    return ssa.init_params(jax.random.key(0), CONFIG)


def batch(rows=4, length=24, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 2, (rows, length)).astype(np.float32)
    return {"tokens": rng.integers(0, 31, (rows, length + 1)).astype(np.int32), "weights": weights}


def near(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=0), a, b)


def test_the_loss_is_the_drawn_streams_cross_entropy_and_the_mean_alignment_of_the_layers():
    data = batch()
    loss = jax.jit(functools.partial(ssa.training_loss, config=CONFIG))
    evaluate = jax.jit(ssa.next_token_loss, static_argnames=("config", "mode"))
    drawn = set()
    for seed in range(4):
        key = jax.random.key(seed)
        value, metrics = loss(params(), data, step_key=key)
        mode = "sparse" if ssa.sample_mode(key, CONFIG.attention) else "full"
        drawn.add(mode)
        assert metrics["sparse"] == (mode == "sparse")
        near(metrics["cross_entropy"], evaluate(params(), data, config=CONFIG, mode=mode)[0])
        near(value, metrics["cross_entropy"] + 10 * metrics["align"])
        assert metrics["tokens"] == data["weights"].sum()
    assert drawn == {"full", "sparse"}


@jax.jit
def hand_written(params, tokens, mode):
    """One alignment per layer, by blocks of the transformer: what the stream of the mode brings to each."""
    x = transformer.embed(params, tokens, SIZES)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    aligns = []
    for layer in params["layers"]:
        seen = {}

        def attention(inputs, seen=seen):
            gate = jax.nn.sigmoid(inputs.hidden @ inputs.params["gate"]["kernel"])[..., None]
            rows = inputs.query, inputs.key, inputs.value
            chosen = ssa.select_blocks(*rows[:2], block_size=8, num_blocks=1).indices
            full = ssa.full_attention(*rows) * gate
            sparse = ssa.sparse_attention(*rows, chosen, block_size=8) * gate
            far = jnp.abs(full - sparse)
            seen["align"] = jnp.where(far < 1, far**2, 2 * far - 1).mean()  # twice the smooth distance
            return jnp.where(mode, sparse, full), None

        x, _ = transformer.block(layer, x, config=SIZES, positions=positions, attention=attention)
        aligns.append(seen["align"])
    return jnp.stack(aligns)


def test_every_layer_is_aligned_on_its_gated_outputs_before_the_projection():
    tokens = batch()["tokens"][:, :-1]
    for mode in (True, False):
        out = jax.jit(lambda p, t, m: ssa.forward(p, t, CONFIG, mode=m, train=True, audit=True))(
            params(), tokens, mode
        )
        aligns = hand_written(params(), tokens, mode)
        near(jnp.stack([info.align for info in out.info]), aligns, 1e-6)
        assert all(0.05 < info.dropped_mass < 0.9 for info in out.info)
        near(ssa.ssa_loss(jnp.array(2.0), out.info, CONFIG.attention), 2 + 10 * aligns.mean(), 1e-5)
    stacked = transformer.stack_layers(params())
    scanned = jax.jit(lambda p, t: ssa.forward(p, t, CONFIG, mode=False, train=True).info)(stacked, tokens)
    near(scanned.align, aligns, 1e-6)
    near(ssa.ssa_loss(jnp.array(2.0), scanned, CONFIG.attention), 2 + 10 * aligns.mean(), 1e-5)


def test_one_draw_serves_a_step_however_it_is_cut_up():
    optimizer = optax.sgd(0.0)
    loss = functools.partial(ssa.training_loss, config=CONFIG)
    drawn = []
    for parts in (1, 2):
        step = train.make_step(loss, optimizer, accumulate=parts)
        state = train.init_state(jax.random.key(3), params(), optimizer)
        rows = []
        for number in range(6):
            state, metrics = step(state, batch(seed=number))
            rows.append((float(metrics["sparse"]), float(metrics["cross_entropy"])))
        assert step.compilations() == 1
        drawn.append(rows)
    near(drawn[0], drawn[1])
    assert {mode for mode, _ in drawn[0]} == {0.0, 1.0}  # never a part of a batch in the other mode
    evaluate = jax.jit(ssa.next_token_loss, static_argnames=("config", "mode"))
    for number, (sparse, loss) in enumerate(drawn[0][:4]):  # nor a layer
        mode = "sparse" if sparse else "full"
        near(loss, evaluate(params(), batch(seed=number), config=CONFIG, mode=mode)[0])


@pytest.mark.parametrize("scanned", [False, True])
def test_recomputation_keeps_the_chosen_blocks(scanned):
    tree = transformer.stack_layers(params()) if scanned else params()
    data = batch()

    def slope(rematerialize):
        def loss(tree):
            return ssa.training_loss(
                tree, data, CONFIG, step_key=jax.random.key(0), rematerialize=rematerialize
            )[0]

        return jax.grad(loss)

    def choices(policy):
        return str(jax.make_jaxpr(slope(policy))(tree)).count("top_k")

    plain, kept, again = choices(False), choices(ssa.keep_indices), choices(True)
    assert kept == plain < again
    if not scanned:
        near(jax.jit(slope(ssa.keep_indices))(tree), jax.jit(slope(False))(tree), 2e-5)


def test_the_module_is_the_functions():
    config = ssa.SSAConfig(block_size=8, num_blocks=2)
    layer = ssa.SSAAttention(SIZES, config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 30, 16))
    run = jax.jit(lambda layer, x, mode: layer(x, mode=mode, train=True))
    output, info = run(layer, x, jnp.array(True))
    weights = {
        name: {"kernel": getattr(layer, name).get_value()}
        for name in ("query", "key", "value", "output", "gate")
    }
    seam = functools.partial(ssa.attention, config=config, mode="sparse", train=True)
    found = {}

    def attention(inputs):
        found["output"], found["info"] = seam(inputs)
        return found["output"], None

    none = {"scale": jnp.ones(16)}
    layer_params = {**params()["layers"][0], "attention": weights, "attention_norm": none}
    # An input whose RMS is 1 is its own norm.
    unit = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    positions = jnp.broadcast_to(jnp.arange(30), (2, 30))
    transformer.block(layer_params, x, config=SIZES, positions=positions, attention=attention)
    wanted = found["output"].reshape(2, 30, -1) @ weights["output"]["kernel"]
    near(run(layer, unit, jnp.array(True))[0], wanted, 1e-5)
    near(run(layer, unit, jnp.array(True))[1].align, found["info"].align, 1e-6)
    assert info.align > 0
    (cache,) = ssa.init_cache(
        transformer.TransformerConfig(1, 16, 1, 4, 8, num_kv_heads=2), 2, 32, block_size=8
    )
    decode = jax.jit(lambda layer, x, cache: layer.decode(x, cache))
    rows = []
    for at in range(0, 30, 6):
        out, cache = decode(layer, x[:, at : at + 6], cache)
        rows.append(out)
    near(jnp.concatenate(rows, 1), output, 1e-5)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(6):
        words = rng.choice(["alpha", "beta", "gamma", "delta", "epsilon"], size=400)
        (folder / f"part-{number}.txt").write_text(" ".join(words) + "\n")
    return str(folder)


TINY = {"steps": 4, "batch_size": 4, "length": 32, "width": 16, "num_layers": 1, "num_heads": 2}
TINY |= {"evaluate_every": 2, "checkpoint_every": 2, "evaluation_tokens": 256}
TINY |= {"attention": "ssa", "block_size": 8, "num_blocks": 1}


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ssa") / "run"
    return train_model(TrainConfig(**TINY, data=text), folder)


def test_a_run_leaves_a_model_of_its_kind_that_reads_and_writes_in_both_modes(run, text, capsys, tmp_path):
    loaded = models.load(run.folder)
    assert loaded.kind == "ssa"
    assert loaded.config.attention.num_blocks == 1
    jax.tree.map(np.testing.assert_array_equal, loaded.params, run.params)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert {"align", "sparse", "cross_entropy"} <= set(rows[0])
    assert rows[-1]["evaluation_sparse_nats_per_token"] == pytest.approx(
        run.held_out["sparse_nats_per_token"]
    )

    def evaluate(*more):
        options = ["--data", text, "--max-tokens", "256", "--out", str(tmp_path)]
        assert cli.main(["evaluate", str(run.folder), *options, *more]) == 0
        capsys.readouterr()
        return json.loads((tmp_path / "result.json").read_text())["rows"][0]

    own, full = evaluate(), evaluate("--attention-mode", "full")
    sparse, wide = (
        evaluate("--attention-mode", "sparse"),
        evaluate("--attention-mode", "sparse", "--num-blocks", "4"),
    )
    assert (
        own["nats_per_token"]
        == full["nats_per_token"]
        == pytest.approx(run.held_out["nats_per_token"], abs=1e-5)
    )
    assert sparse["nats_per_token"] == pytest.approx(run.held_out["sparse_nats_per_token"], abs=1e-5)
    assert (
        wide["nats_per_token"] == pytest.approx(full["nats_per_token"], abs=1e-5) != sparse["nats_per_token"]
    )
    # Of windows of 32 tokens, none reads more than these.
    assert (sparse["keys_read"], wide["keys_read"]) == (8, 32)
    again = json.loads((tmp_path / "result.json").read_text())["command"]
    assert (
        again
        == f"effml evaluate {run.folder} --data {text} --max-tokens 256 --attention-mode sparse --num-blocks 4"
    )
    assert evaluate("--attention-mode", "sparse", "--num-blocks", "9")["keys_read"] == 32
    assert cli.main(["generate", str(run.folder), "--prompt", "alpha ", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("alpha ")
    narrow = models.load(run.folder, dtype="bfloat16")
    assert narrow.config.model.compute_dtype == "bfloat16"
    assert jax.tree.leaves(narrow.params)[0].dtype == jnp.bfloat16


def test_a_stopped_run_resumes_to_the_same_numbers(run, text, tmp_path, monkeypatch):
    import os
    import signal

    shown = train.Progress.__call__

    def stop_at_three(self, update):
        shown(self, update)
        if update.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train.Progress, "__call__", stop_at_three)
    settings = TrainConfig(**TINY, data=text)
    assert train_model(settings, tmp_path / "run").signal_number == signal.SIGINT
    monkeypatch.undo()
    resumed = train_model(read_config(tmp_path / "run"), tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, run.params)
    assert resumed.history == run.history


def test_a_run_of_a_version_without_these_options_goes_on(text, tmp_path):
    settings = TrainConfig(**{**TINY, "attention": "full", "block_size": None, "num_blocks": None}, data=text)
    train_model(settings, tmp_path / "run")
    path = tmp_path / "run/train.json"
    before = json.loads(path.read_text())
    path.write_text(
        json.dumps({k: v for k, v in before.items() if k not in ("block_size", "num_blocks", "align_weight")})
    )
    train_model(settings, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "sparse"}, "attention='sparse' is not known"),
        ({"attention": "full"}, "block_size=8 needs attention='ssa'"),
        ({"block_size": 4}, "block_size=4 must be at least 8"),
        ({"block_size": 0}, "block_size=0 must be above 0"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"align_weight": -1.0}, r"align_weight=-1\.0"),
    ],
)
def test_bad_settings_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**{**TINY, **changes})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--attention-mode", "spare"], "did you mean 'sparse'"),
        (["--num-blocks", "2"], "need --attention-mode sparse"),
        (["--attention-mode", "sparse", "--num-blocks", "0"], "num_blocks=0 must be above 0"),
        (["--attention-mode", "sparse", "--block-size", "7"], "block_size=7 must be at least 8"),
    ],
)
def test_evaluate_names_what_is_wrong(run, text, capsys, options, words):
    assert cli.main(["evaluate", str(run.folder), "--data", text, *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_blocks_that_the_quantised_cache_can_not_take_are_named(run, tmp_path, capsys):
    folder = tmp_path / "model"
    models.save(
        folder,
        run.params,
        dataclasses.replace(run.model, attention=ssa.SSAConfig(12, 1)),
        kind="ssa",
        tokenizer=models.load(run.folder).tokenizer,
    )
    options = ["--prompt", "alpha ", "--max-new-tokens", "2", "--cache", "ffd"]
    assert cli.main(["generate", str(folder), *options]) == 2
    assert "the model's blocks of 12 tokens do not fit --cache ffd" in capsys.readouterr().err
    assert cli.main(["generate", str(folder), *options, "--cache-block", "16"]) == 0


def test_damaged_folders_are_named(run, tmp_path):
    folder = tmp_path / "model"
    models.save(folder, run.params, run.model, kind="ssa")
    meta = json.loads((folder / "effml.json").read_text())
    for change, words in (
        (
            {"attention": {**meta["config"]["attention"], "num_blocks": "4"}},
            "num_blocks='4' must be of type int",
        ),
        (
            {"attention": {**meta["config"]["attention"], "blocks": 4}},
            "attention field='blocks' is not known",
        ),
        ({"attention": None}, "config field attention must be an object"),
        ({"attention": {**meta["config"]["attention"], "gated": False}}, "unexpected tensors: .*gate"),
    ):
        (folder / "effml.json").write_text(json.dumps({**meta, "config": {**meta["config"], **change}}))
        with pytest.raises(ValueError, match=words):
            models.load(folder)
