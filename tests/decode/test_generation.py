import dataclasses
import functools
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.data import ByteTokenizer
from effml.decode import SamplingConfig, _loop, generate, pad_prompts, stream, stream_text
from effml.nn import cache as dense
from effml.nn.transformer import (
    TransformerConfig,
    decoding_linear,
    dense_attention,
    forward,
    init_params,
    stack_layers,
)
from pallas_kernels.matvec import cpu

# Large initial weights, so that the choice varies from token to token and near-ties are rare.
CONFIG = TransformerConfig(
    vocab_size=61,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=48,
    max_length=1024,
    initializer_std=0.3,
)


def make_model(config=CONFIG, *, seed=0, scanned=False, **extra):
    return types.SimpleNamespace(
        config=config,
        params=init_params(jax.random.key(seed), config, scanned=scanned),
        forward=functools.partial(forward, config=config),
        **extra,
    )


def uncached(model, prompt, count, choose=lambda step, logits: int(jnp.argmax(logits))):
    """The whole text again for each token, without a cache. Padding on the right changes no earlier row."""
    run = jax.jit(lambda params, tokens: model.forward(params, tokens).logits)
    ids = list(prompt)
    for step in range(count):
        padded = np.zeros((1, len(prompt) + count), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(choose(step, run(model.params, padded)[0, len(ids) - 1]))
    return ids[len(prompt) :]


PROMPTS = [[5, 17, 3], [60], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]]


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        TransformerConfig(
            40,
            16,
            2,
            2,
            24,
            norm="layer",
            positions="learned",
            mlp="gelu",
            max_length=40,
            initializer_std=0.4,
        ),
    ],
    ids=["llama", "gpt2"],
)
def test_greedy_tokens_are_the_argmax_of_the_uncached_model_at_every_step(config):
    model = make_model(config)
    prompts = [[token % config.vocab_size for token in prompt] for prompt in PROMPTS]
    tokens, lengths = pad_prompts(prompts)
    tokens[tokens == 0] = 7  # what the padding holds must not matter
    written = generate(model, tokens, lengths=lengths, max_new_tokens=20)
    assert written.lengths.tolist() == [20, 20, 20]
    assert not written.stopped.any()
    for row, prompt in zip(written.tokens, prompts):
        assert row.tolist() == uncached(model, prompt, 20)


def test_scanned_layers_write_the_same():
    model = make_model()
    scanned = types.SimpleNamespace(**{**vars(model), "params": stack_layers(model.params)})
    tokens, lengths = pad_prompts(PROMPTS)
    first = generate(model, tokens, lengths=lengths, max_new_tokens=6)
    second = generate(scanned, tokens, lengths=lengths, max_new_tokens=6)
    np.testing.assert_array_equal(first.tokens, second.tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_products_for_decoding_write_the_same(tied):
    """With native code where it can be built, which the step then holds for every product; else with XLA."""
    config = dataclasses.replace(CONFIG, tied_head=tied)
    model = make_model(config)
    quick = make_model(config)
    quick.forward = functools.partial(forward, config=config, linear=decoding_linear)
    tokens, lengths = pad_prompts(PROMPTS)
    expected = generate(model, tokens, lengths=lengths, max_new_tokens=12).tokens
    np.testing.assert_array_equal(
        generate(quick, tokens, lengths=lengths, max_new_tokens=12).tokens, expected
    )
    cache = dense.init_cache(config, 1, 16)
    step = jax.jit(lambda params, token: quick.forward(params, token, cache=cache).logits)
    compiled = step.lower(model.params, jnp.ones((1, 1), jnp.int32)).compile().as_text()
    if cpu.why_not() is None:
        assert compiled.count('custom_call_target="effml_matvec"') == 7 * config.num_layers + 1
        assert not re.search(r" dot\(.*metadata.*linear", compiled)
        vocab, width = config.vocab_size, config.width
        assert not re.search(rf"f32\[{width},{vocab}\]\S* (?:copy|transpose)\(", compiled)


def test_drawn_tokens_are_those_of_the_uncached_model_with_the_documented_keys():
    model = make_model()
    sampling, key = SamplingConfig(temperature=0.9), jax.random.key(4)
    tokens, lengths = pad_prompts(PROMPTS[:2])
    written = generate(model, tokens, lengths=lengths, max_new_tokens=8, sampling=sampling, key=key)
    for row, prompt in enumerate(PROMPTS[:2]):

        def choose(step, logits, row=row):
            step_key = jax.random.fold_in(jax.random.fold_in(key, row), step)
            return int(jax.random.categorical(step_key, logits / 0.9))

        assert written.tokens[row].tolist() == uncached(model, prompt, 8, choose)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=1.0, top_k=20, top_p=0.9)])
def test_streaming_gives_the_tokens_of_generate_whatever_the_chunk(sampling):
    model, key = make_model(), jax.random.key(5)
    whole = generate(model, [PROMPTS[0]], max_new_tokens=23, sampling=sampling, key=key).tokens[0].tolist()
    for chunk in (1, 5, 64):
        streamed = stream(model, PROMPTS[0], max_new_tokens=23, sampling=sampling, key=key, chunk=chunk)
        assert list(streamed) == whole


def test_stop_ids_end_each_sequence_by_itself_and_are_not_counted():
    model = make_model()
    tokens, lengths = pad_prompts(PROMPTS)
    free = generate(model, tokens, lengths=lengths, max_new_tokens=12).tokens
    stop = int(free[0, 4])
    written = generate(model, tokens, lengths=lengths, max_new_tokens=12, stop_ids=[stop])
    for row in range(3):
        hits = np.flatnonzero(free[row] == stop)
        length = hits[0] if hits.size else 12
        assert written.lengths[row] == length
        assert written.stopped[row] == bool(hits.size)
        assert written.tokens[row].tolist() == free[row, :length].tolist() + [0] * (12 - length)
    assert (
        list(stream(model, PROMPTS[0], max_new_tokens=12, stop_ids=[stop]))
        == free[0, : written.lengths[0]].tolist()
    )


def test_a_first_token_that_stops_gives_an_empty_text():
    model = make_model()
    first = int(generate(model, [PROMPTS[0]], max_new_tokens=1).tokens[0, 0])
    written = generate(model, [PROMPTS[0]], max_new_tokens=5, stop_ids=[first])
    assert written.lengths.tolist() == [0]
    assert written.stopped.tolist() == [True]
    assert list(stream(model, PROMPTS[0], max_new_tokens=5, stop_ids=[first])) == []


def test_the_loop_ends_when_all_sequences_have_ended():
    """Counts the model calls that run, not those that are traced."""
    calls = []

    def counted(params, tokens, **kwargs):
        jax.debug.callback(lambda: calls.append(1))
        return forward(params, tokens, config=CONFIG, **kwargs)

    model = make_model()
    free = generate(model, [PROMPTS[0]], max_new_tokens=10).tokens[0]
    model.forward = counted
    written = generate(model, [PROMPTS[0]], max_new_tokens=200, stop_ids=[int(free[5])])
    jax.effects_barrier()
    assert len(calls) == written.lengths[0] + 1 <= 6


def test_the_cache_grows_without_changing_the_text(monkeypatch):
    model = make_model()
    whole = generate(model, [PROMPTS[0]], max_new_tokens=90).tokens
    monkeypatch.setattr(_loop, "capacities", lambda prompt, total, growing: [16, 32, 64, 128])
    np.testing.assert_array_equal(generate(model, [PROMPTS[0]], max_new_tokens=90).tokens, whole)
    assert list(stream(model, PROMPTS[0], max_new_tokens=90, chunk=7)) == whole[0].tolist()


def test_a_second_prompt_of_about_the_same_length_compiles_nothing():
    """At most one trace to read the prompt and one to write, over calls that differ in every dynamic way."""
    model = make_model()

    def traced(params, tokens, **kwargs):
        return forward(params, tokens, config=CONFIG, **kwargs)

    model.forward = chex.assert_max_traces(traced, n=2)
    for prompt, count, stops in (([1, 2], 5, ()), ([3] * 15, 40, (60,)), ([7] * 9, 17, (60, 59))):
        list(stream(model, prompt, max_new_tokens=count, stop_ids=stops))


def test_two_loads_of_one_model_share_their_programs():
    first, second = make_model(), make_model(seed=1)
    assert first.forward is not second.forward
    frozen = [_loop.freeze(model.forward, model.config, None, None, None) for model in (first, second)]
    assert frozen[0] == frozen[1]
    assert hash(frozen[0]) == hash(frozen[1])


def test_a_step_of_writing_copies_no_cache():
    """The row of a token is written in place, and no side of the cache is turned around to be read."""
    model = make_model()
    frozen = _loop.freeze(model.forward, model.config, None, None, None)
    greedy, no_stop = SamplingConfig(), jnp.zeros((0,), jnp.int32)
    prompt, length = jnp.array([PROMPTS[0]]), jnp.array([3])
    state = _loop.prefill(
        model.params, prompt, length, None, no_stop, model=frozen, sampling=greedy, capacity=128
    )
    lowered = _loop.write.lower(
        model.params, state, None, no_stop, jnp.int32(8), model=frozen, sampling=greedy, room=8
    )
    text = lowered.compile().as_text()
    heads, size = CONFIG.kv_heads, CONFIG.head_dim
    sides = rf"f32\[1,(?:{heads},{size},128|{heads},128,{size})\]"
    assert re.search(rf"= {sides}\S* fusion\(", text)  # the write
    assert not re.findall(rf"= {sides}\S* (?:copy|transpose)\(", text)


def test_the_text_in_a_batch_is_the_text_alone():
    model = make_model()
    tokens, lengths = pad_prompts(PROMPTS)
    together = generate(model, tokens, lengths=lengths, max_new_tokens=9).tokens
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(generate(model, [prompt], max_new_tokens=9).tokens[0], together[row])


def test_another_kind_of_cache_and_attention_can_be_given():
    class Doubled(dense.DenseCache):
        """A cache with its rows stored twice as large."""

    def init(config, batch, capacity):
        return [Doubled(*layer) for layer in dense.init_cache(config, batch, capacity)]

    def append(layer, keys, values, rows, counts):
        return Doubled(*dense.append(dense.DenseCache(*layer), 2 * keys, 2 * values, rows, counts))

    def attention(inputs):
        layer = inputs.cache
        halved = dense.DenseCache(layer.keys / 2, layer.values / 2, layer.length)
        return dense_attention(inputs._replace(cache=halved))

    model = make_model()
    other = {"cache_init": init, "append": append, "attention": attention}
    expected = generate(model, [PROMPTS[0]], max_new_tokens=9).tokens
    np.testing.assert_array_equal(generate(model, [PROMPTS[0]], max_new_tokens=9, **other).tokens, expected)
    wrong = {**other, "attention": dense_attention}  # the factor of two is really there
    assert (generate(model, [PROMPTS[0]], max_new_tokens=9, **wrong).tokens != expected).any()


def test_text_streams_in_whole_characters_and_ends_before_the_stop_text():
    script = "né — ok\nEND of it".encode()
    vocab = 256

    def scripted(params, tokens, *, cache, logits_for):
        """The byte that follows in the script, whatever the model would say."""
        del logits_for
        ends = cache[0].length + (tokens.shape[1] if tokens.shape[1] == 1 else 1)
        nxt = jnp.asarray(np.frombuffer(script, np.uint8).astype(np.int32))[ends - 1]
        logits = jax.nn.one_hot(nxt, vocab)[:, None]
        keys = [jnp.zeros((tokens.shape[0], tokens.shape[1], 1, 2))]
        return types.SimpleNamespace(logits=logits, keys=keys, values=keys)

    config = TransformerConfig(vocab, 2, 1, 1, 2)
    model = make_model(config, tokenizer=ByteTokenizer())
    model.forward = scripted
    out = list(stream_text(model, "x", max_new_tokens=len(script) - 1, chunk=1))
    assert "".join(piece for piece, _ in out) == script.decode()[:-1]
    assert sum(count for _, count in out) == len(script) - 1
    assert all("\ufffd" not in piece for piece, _ in out)
    stopped = list(stream_text(model, "x", max_new_tokens=len(script) - 1, chunk=4, stop=["END"]))
    assert "".join(piece for piece, _ in stopped) == "né — ok\n"
    assert sum(count for _, count in stopped) < len(script) - 1


def test_text_begins_with_what_the_tokenizer_puts_in_front_unless_it_is_a_rendered_chat():
    from tokenizers import Tokenizer, models, processors

    from effml.data import BpeTokenizer

    backend = Tokenizer(models.BPE({"<s>": 0} | {chr(96 + i): i for i in range(1, 27)}, []))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = BpeTokenizer.from_tokenizer(backend, 0, stop_ids=())
    model = make_model(TransformerConfig(27, 16, 1, 2, 24, initializer_std=0.5), tokenizer=tokenizer)

    def text(prompt, **options):
        return "".join(piece for piece, _ in stream_text(model, prompt, max_new_tokens=12, **options))

    def by_ids(ids):
        return tokenizer.decode(list(stream(model, ids, max_new_tokens=12)))

    assert text("ba") == text("<s>ba") == by_ids([0, 2, 1])
    assert text("ba", prefix=False) == by_ids([2, 1]) != text("ba")
    assert text("<s>ba", prefix=False) == text("ba")
    assert text("") == by_ids([0])
    with pytest.raises(ValueError, match="prompt is empty"):
        text("", prefix=False)


def test_greedy_text_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    peer_config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    torch.manual_seed(0)
    peer = transformers.LlamaForCausalLM(peer_config).eval()
    tensors = {name: value.detach().numpy() for name, value in peer.state_dict().items()}

    def kernel(name):
        return {"kernel": jnp.asarray(tensors[name + ".weight"].T)}

    def layer(i):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        return {
            "attention_norm": {"scale": jnp.asarray(tensors[f"model.layers.{i}.input_layernorm.weight"])},
            "attention": {ours: kernel(at + theirs) for ours, theirs in names.items()},
            "mlp_norm": {"scale": jnp.asarray(tensors[f"model.layers.{i}.post_attention_layernorm.weight"])},
            "mlp": {name: kernel(f"{mlp}{name}_proj") for name in ("gate", "up", "down")},
        }

    model = make_model()
    model.params = {
        "embedding": {"table": jnp.asarray(tensors["model.embed_tokens.weight"])},
        "layers": [layer(i) for i in range(2)],
        "final_norm": {"scale": jnp.asarray(tensors["model.norm.weight"])},
    }
    for prompt in PROMPTS:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            expected = peer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
            )
        written = generate(model, [prompt], max_new_tokens=20).tokens[0]
        assert written.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompt_tokens": np.zeros((1, 0), np.int32)}, "empty"),
        ({"prompt_tokens": [[1, 61]]}, "token id 61 at position 1 of prompt 0"),
        ({"prompt_tokens": [[1, -1]]}, "token id -1"),
        ({"prompt_tokens": [[0.5]]}, "integer"),
        ({"prompt_tokens": [1, 2]}, r"shape \(2,\)"),
        ({"lengths": [0]}, "empty prompt"),
        ({"lengths": [4]}, "between 1"),
        ({"lengths": [1, 1]}, "one per prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3"),
        ({"max_new_tokens": 1022}, "max_length=1024"),
        ({"sampling": SamplingConfig(temperature=1.0)}, "key"),
        ({"attention": dense_attention}, "cache_init"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        generate(make_model(), **{"prompt_tokens": [[1, 2, 3]], "max_new_tokens": 2, **arguments})


def test_streams_check_their_arguments_at_once():
    model = make_model(tokenizer=None)
    for bad, named in (([], "empty"), ([99], "token id 99"), ([[1]], "one sequence")):
        with pytest.raises(ValueError, match=named):
            stream(model, bad, max_new_tokens=2)
    with pytest.raises(ValueError, match="chunk=0"):
        stream(model, [1], max_new_tokens=2, chunk=0)
    with pytest.raises(ValueError, match="tokenizer"):
        stream_text(model, "a", max_new_tokens=2)
    model.tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match="empty"):
        stream_text(model, "", max_new_tokens=2)
    with pytest.raises(ValueError, match="stop_ids"):
        stream(model, [1], max_new_tokens=2, stop_ids=(model.config.vocab_size,))
    with pytest.raises(TypeError, match="max_new_tokens"):
        stream(model, [1], max_new_tokens=2.5)
    with pytest.raises(ValueError, match="at least one"):
        pad_prompts([])


def test_a_prompt_may_fill_the_model_up_to_its_last_position():
    config = TransformerConfig(40, 16, 1, 2, 24, positions="learned", max_length=19, initializer_std=0.4)
    model = make_model(config)
    assert generate(model, [[3] * 17], max_new_tokens=2).tokens[0].tolist() == uncached(model, [3] * 17, 2)


@pytest.mark.parametrize("place", ["prompt", "later"])
def test_nan_logits_end_generation_with_the_step(place):
    model = make_model()
    text = [*PROMPTS[0], *generate(model, [PROMPTS[0]], max_new_tokens=12).tokens[0].tolist()]
    # A token that comes for the first time after some steps: reading it makes the next logits NaN.
    read = 0 if place == "prompt" else next(i for i in range(5, len(text)) if text[i] not in text[:i])
    token = text[read]
    table = model.params["embedding"]["table"].at[token, 0].set(jnp.nan)
    untied = {**model.params, "head": {"kernel": model.params["embedding"]["table"].T}}
    config = TransformerConfig.from_dict({**CONFIG.to_dict(), "tied_head": False})
    broken = make_model(config)
    broken.params = {**untied, "embedding": {"table": table}}
    step = 0 if place == "prompt" else read - len(PROMPTS[0]) + 1
    with pytest.raises(ValueError, match=f"sequence 0 are NaN at new token {step}"):
        generate(broken, [PROMPTS[0]], max_new_tokens=20)
    with pytest.raises(ValueError, match=f"NaN at new token {step}"):
        list(stream(broken, PROMPTS[0], max_new_tokens=20))
