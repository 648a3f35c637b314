"""Tokenizers: lossless, deterministic, and clear about what they cannot do."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from effml.data import (
    BpeTokenizer,
    ByteTokenizer,
    StreamDecoder,
    Tokenizer,
    check_tokens,
    encode_prompt,
    load_corpus,
    load_tokenizer,
    train_tokenizer,
)

TEXTS = ["the cat sat on the mat", "the dog sat on the cat", "naïve café, 猫 🙂🙂"] * 20
BPE = BpeTokenizer.train(TEXTS, vocab_size=280)
texts = st.text() | st.text("ab é猫🙂👩‍👩‍👧\0\n ", max_size=20)


def word_tokenizer(unknown: str | None = None) -> BpeTokenizer:
    """Letters only, no bytes: text outside them has no tokens."""
    vocabulary = {c: i for i, c in enumerate(["<|end|>", "a", "b", "ab", *([unknown] if unknown else [])])}
    backend = Backend(models.BPE(vocabulary, [("a", "b")], unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return BpeTokenizer.from_tokenizer(backend, 0)


def fallback_tokenizer() -> BpeTokenizer:
    """Bytes as tokens of their own (`<0x41>`) and a decoder that strips the leading space, as in Llama 2."""
    vocabulary = {f"<0x{b:02X}>": b for b in range(256)} | {
        "▁": 256,
        "a": 257,
        "▁a": 258,
        "<unk>": 259,
        "</s>": 260,
    }
    backend = Backend(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return BpeTokenizer.from_tokenizer(backend, 260)


def template_tokenizer(single: str, base: BpeTokenizer = BPE) -> BpeTokenizer:
    """A tokenizer that writes ids around each text, as those of Llama 3 and Mistral do (and BERT's, behind it)."""
    backend = Backend.from_str(base.tokenizer.to_str())
    backend.add_special_tokens(["<s>", "<t>", "</s>"])
    special = [(name, backend.token_to_id(name)) for name in ("<s>", "<t>", "</s>")]
    template = processors.TemplateProcessing(single=single, special_tokens=special)
    # Llama 3 has a sequence, whose first part only moves offsets.
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return BpeTokenizer.from_tokenizer(backend, 0, "{{ bos_token }}", stop_ids=[0])


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "byte" else BPE


@given(texts)
def test_bytes_round_trip_any_text(text):
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode())
    assert ids.dtype == np.int32
    assert ByteTokenizer().decode(ids) == text


@settings(deadline=None)
@given(texts)
def test_bpe_round_trips_any_text(text):
    for special_tokens in (True, False):
        ids = BPE.encode(text, special_tokens=special_tokens)
        assert ids.dtype == np.int32
        assert BPE.decode(ids) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), max_size=12))
def test_bpe_decodes_any_ids_as_the_tokenizers_package_does(ids):
    known = [i for i in ids if i < BPE.vocab_size]
    assert BPE.decode(ids) == BPE.tokenizer.decode(known, skip_special_tokens=False)


@settings(deadline=None)
@given(texts, st.lists(st.integers(1, 3), max_size=50))
def test_streamed_pieces_join_to_the_text_and_hold_no_half_character(text, sizes):
    for tokenizer in (ByteTokenizer(), BPE):
        ids = tokenizer.encode(text)
        stream, pieces, start = StreamDecoder(tokenizer), [], 0
        for size in [*sizes, len(ids)]:
            pieces.append(stream.push(ids[start : start + size]))
            start += size
        assert "".join(pieces) == text
        assert stream.finish() == ""
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=12))
def test_streamed_broken_bytes_equal_decoding_at_once(ids):
    stream = StreamDecoder(ByteTokenizer())
    assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == ByteTokenizer().decode(ids)


@settings(deadline=None)
@given(st.text("a é🙂", max_size=12))
def test_streaming_follows_decoders_that_depend_on_what_came_before(text):
    tokenizer = fallback_tokenizer()
    ids = tokenizer.encode(text)
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push([i]) for i in ids.tolist()]
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids)
    assert not [piece for piece in pieces if "\ufffd" in piece]


def test_stream_gives_text_as_soon_as_it_is_whole():
    stream = StreamDecoder(ByteTokenizer())
    assert [stream.push([byte]) for byte in "a🙂".encode()] == ["a", "", "", "", "🙂"]
    assert stream.push(list("🙂".encode()[:2])) == ""
    assert stream.finish() == "\ufffd"


def test_bpe_joins_frequent_pairs():
    assert BPE.vocab_size == 280
    assert len(BPE.encode("the cat sat")) <= 4


def test_bpe_ids_stay_in_the_vocabulary(tokenizer):
    ids = tokenizer.encode("".join(map(chr, range(1, 3000))))
    assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert tokenizer.end_id in tokenizer.stop_ids


def test_text_that_spells_the_end_token_can_be_kept_as_text():
    assert BPE.encode("a<|end|>").tolist().count(BPE.end_id) == 1
    assert BPE.end_id not in BPE.encode("a<|end|>", special_tokens=False)


def test_both_kinds_are_tokenizers(tokenizer):
    assert isinstance(tokenizer, Tokenizer)


def test_saved_tokenizers_load_as_they_were(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert type(loaded) is type(tokenizer)
    for name in ("kind", "vocab_size", "end_id", "stop_ids", "prefix_ids", "chat_template"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert loaded.encode("the naïve 猫").tolist() == tokenizer.encode("the naïve 猫").tolist()
    assert not list((tmp_path / "new" / "folder").glob(".*"))


def test_chat_template_and_stop_ids_are_saved(tmp_path):
    tokenizer = BpeTokenizer.from_tokenizer(BPE.tokenizer, 0, "{{ messages }} é", stop_ids=[0, 7])
    tokenizer.save(tmp_path)
    loaded = BpeTokenizer.load(tmp_path)
    assert (loaded.chat_template, loaded.stop_ids) == ("{{ messages }} é", (0, 7))


def test_padding_and_truncation_of_a_shipped_tokenizer_are_switched_off():
    shipped = Backend.from_str(BPE.tokenizer.to_str())
    shipped.enable_padding(length=50)
    shipped.enable_truncation(3)
    wrapped = BpeTokenizer.from_tokenizer(shipped, 0)
    assert wrapped.encode("the cat sat on a mat").tolist() == BPE.encode("the cat sat on a mat").tolist()
    assert shipped.truncation is not None


def test_bpe_learns_from_the_training_side_alone(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"zebra{i} " * 50)
    corpus = load_corpus(tmp_path, held_out_fraction=0.4)
    for path in corpus.held_out:
        path.unlink()
    assert train_tokenizer("bpe", corpus, vocab_size=300).vocab_size > 260
    assert train_tokenizer("byte", corpus).vocab_size == 256


def test_training_gives_the_same_tokenizer_in_every_process():
    code = (
        "from effml.data import load_corpus, train_tokenizer;"
        "print(train_tokenizer('bpe', load_corpus('stdlib', max_bytes=200_000), 600).tokenizer.to_str())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "2"))
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("single", "names"),
    [
        ("<s> $A", ["<s>"]),
        ("<s> <t> $A </s>", ["<s>", "<t>"]),
        ("$A </s>", []),
        ("$A", []),
    ],
)
def test_what_the_post_processor_puts_in_front_is_the_prefix(single, names, tmp_path):
    tokenizer = template_tokenizer(single)
    expected = tuple(tokenizer.tokenizer.token_to_id(name) for name in names)
    assert tokenizer.prefix_ids == expected
    assert tokenizer.encode("the cat").tolist() == BPE.encode("the cat").tolist()
    assert encode_prompt(tokenizer, "the cat").tolist() == [*expected, *BPE.encode("the cat")]
    assert encode_prompt(tokenizer, "").tolist() == list(expected)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).prefix_ids == expected


def test_the_prefix_is_found_where_few_texts_have_tokens():
    backend = Backend(models.BPE({"<|end|>": 0, "q": 1}, []))
    backend.post_processor = processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 0)])
    assert BpeTokenizer.from_tokenizer(backend, 0).prefix_ids == (0,)


def test_a_prompt_that_spells_the_prefix_has_it_once_and_as_text_it_has_both():
    tokenizer = template_tokenizer("<s> $A")
    (begin,) = tokenizer.prefix_ids
    rest = BPE.encode("the cat").tolist()
    assert encode_prompt(tokenizer, "<s>the cat").tolist() == [begin, *rest]
    spelled = tokenizer.encode("<s>the cat", special_tokens=False).tolist()
    assert encode_prompt(tokenizer, "<s>the cat", special_tokens=False).tolist() == [begin, *spelled]
    assert begin not in spelled


def test_learned_tokenizers_have_no_prefix(tokenizer):
    assert tokenizer.prefix_ids == ()
    assert encode_prompt(tokenizer, "ab").tolist() == tokenizer.encode("ab").tolist()


class TestBadInput:
    def test_characters_without_tokens_are_named(self):
        assert word_tokenizer().encode("ab b").tolist() == [3, 2]
        with pytest.raises(ValueError, match=r"no tokens for 'é' \(U\+00E9\), '猫' \(U\+732B\)"):
            word_tokenizer().encode("ab é 猫é")

    def test_characters_that_become_the_unknown_token_are_named(self):
        with pytest.raises(ValueError, match=r"no tokens for 'x' \(U\+0078\)"):
            word_tokenizer(unknown="<unk>").encode("ab x")

    def test_byte_level_vocabulary_without_some_bytes(self):
        model = json.loads(BPE.tokenizer.to_str())
        del model["model"]["vocab"]["z"]
        tokenizer = BpeTokenizer.from_tokenizer(Backend.from_str(json.dumps(model)), 0)
        assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
        with pytest.raises(ValueError, match=r"no tokens for 'z'"):
            tokenizer.encode("zebra")

    def test_half_a_surrogate_pair(self, tokenizer):
        with pytest.raises(ValueError, match=r"lone surrogate U\+D83D at character 2"):
            tokenizer.encode("ab\ud83d")

    def test_text_that_is_not_a_string(self, tokenizer):
        with pytest.raises(TypeError):
            tokenizer.encode(b"bytes")

    def test_vocabulary_too_small(self):
        with pytest.raises(ValueError, match="vocab_size=256 must be at least 257"):
            BpeTokenizer.train(["a"], vocab_size=256)

    def test_unknown_name_suggests_the_nearest(self):
        with pytest.raises(ValueError, match=r"tokenizer='bpee' is not known; did you mean 'bpe'\?"):
            train_tokenizer("bpee", load_corpus("stdlib", max_bytes=10_000))

    def test_end_id_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match=r"end_id=280 is outside the vocabulary 0\.\.279"):
            BpeTokenizer.from_tokenizer(BPE.tokenizer, 280)
        with pytest.raises(ValueError, match="stop_ids=-1"):
            BpeTokenizer.from_tokenizer(BPE.tokenizer, 0, stop_ids=[-1])

    def test_ids_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match=r"token 256 at position 1 is outside the vocabulary 0..255"):
            ByteTokenizer().decode([1, 256])
        with pytest.raises(ValueError, match=r"token -1 at position 0"):
            BPE.decode([-1])
        with pytest.raises(ValueError, match=r"token 9 at position \(1, 0\) is outside the vocabulary 0..8"):
            check_tokens(np.array([[1, 2], [9, 3]]), 9)

    def test_ids_that_are_not_integers(self):
        with pytest.raises(TypeError, match="tokens must be integers, not float64"):
            check_tokens([0.5], 256)

    def test_checked_tokens_are_int32_also_when_there_are_none(self):
        assert check_tokens([], 256).dtype == check_tokens(np.array([3], np.uint8), 256).dtype == np.int32

    def test_folder_without_tokenizer(self, tmp_path):
        with pytest.raises(ValueError, match="holds no tokenizer of effml"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"kind": "b', '{"kind": 3}'])
    def test_damaged_description(self, tmp_path, content):
        (tmp_path / "effml_tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"damaged|is not known"):
            load_tokenizer(tmp_path)

    def test_truncated_or_missing_vocabulary(self, tmp_path):
        BPE.save(tmp_path)
        path = tmp_path / "tokenizer.json"
        path.write_text(path.read_text()[:1000])
        with pytest.raises(ValueError, match=r"tokenizer\.json' is missing or damaged"):
            load_tokenizer(tmp_path)
        path.unlink()
        with pytest.raises(ValueError, match=r"tokenizer\.json' is missing or damaged"):
            load_tokenizer(tmp_path)

    def test_vocabulary_of_another_tokenizer(self, tmp_path):
        BPE.save(tmp_path)
        BpeTokenizer.train(["other text"], vocab_size=258).tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=r"not the one that effml_tokenizer\.json describes"):
            load_tokenizer(tmp_path)

    def test_loading_bytes_as_bpe(self, tmp_path):
        ByteTokenizer().save(tmp_path)
        with pytest.raises(ValueError, match="kind 'byte', not 'bpe'"):
            BpeTokenizer.load(tmp_path)


def test_a_tokenizer_of_a_later_format_is_refused(tmp_path):
    ByteTokenizer().save(tmp_path)
    path = tmp_path / "effml_tokenizer.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="format=2; this version of effml reads 1"):
        load_tokenizer(tmp_path)
