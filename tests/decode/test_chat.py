import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effml.decode import StopTexts, render_chat

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello, 世界 <b>"}, {"role": "assistant", "content": "Hi"}]


def test_chatml_is_rendered():
    assert render_chat(CHATML, MESSAGES) == (
        "<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user\nHello, 世界 <b><|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n U {{ m.content | trim }}\n"
        "  {% else %}\n A {{ m.content }}{{ eos_token }}\n  {% endif %}\n{% endfor %}\nend",
        "{{ messages | tojson }} {{ {'a': 'é'} | tojson(indent=2) }}",
        "{% for m in messages %}{% if m.role != 'user' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
        "{% if tools is defined %}{{ tools }}{% else %}undefined{% endif %}{{ documents }}",
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(template, prompt):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = utils.render_jinja_template(
        conversations=[MESSAGES], chat_template=template, add_generation_prompt=prompt, **special
    )
    assert render_chat(template, MESSAGES, add_generation_prompt=prompt, **special) == expected[0]


def test_a_template_cannot_leave_the_sandbox():
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'x', 'content': 'y'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
    ):
        with pytest.raises(ValueError, match="refuses"):
            render_chat(template, MESSAGES)
    assert len(MESSAGES) == 2


@pytest.mark.parametrize(
    ("template", "messages", "named"),
    [
        (None, MESSAGES, "no chat template"),
        ("", MESSAGES, "no chat template"),
        (CHATML, [], "at least one message"),
        (CHATML, [{"role": "user"}], r"messages\[0\]"),
        (CHATML, ["hello"], r"messages\[0\]"),
        ("{% for %}", MESSAGES, "faulty at line 1"),
        ("{{ raise_exception('system is not supported') }}", MESSAGES, "system is not supported"),
        ("{{ 1 + 'a' }}", MESSAGES, "refuses"),
    ],
)
def test_bad_chats_are_named(template, messages, named):
    with pytest.raises(ValueError, match=named):
        render_chat(template, messages)


def oracle(text, stops):
    """Character by character: the text before the stop text that is complete first, the longest of equals."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            found = max(complete, key=len)
            return text[: end - len(found)], found
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_stop_texts_do_not_depend_on_the_pieces(text, stops, cuts):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    passing = StopTexts(stops)
    given_out = [passing.push(text[a:b]) for a, b in itertools.pairwise(borders)]
    whole = "".join(given_out) + passing.finish()
    assert (whole, passing.found) == oracle(text, stops)


def test_only_what_may_begin_a_stop_text_is_held_back():
    stops = StopTexts(["END", "\n\n"])
    assert [stops.push(piece) for piece in ("a", "E", "N", "X", "\n", "b")] == ["a", "", "", "ENX", "", "\nb"]


def test_nothing_comes_after_the_stop_text():
    stops = StopTexts(["."])
    assert stops.push("one. two") == "one"
    assert stops.push("three.") == ""
    assert stops.finish() == ""
    assert stops.found == "."


def test_an_empty_stop_text_and_a_bare_text_are_refused():
    with pytest.raises(ValueError, match="empty"):
        StopTexts(["ok", ""])
    with pytest.raises(TypeError, match="list"):
        StopTexts("END")
