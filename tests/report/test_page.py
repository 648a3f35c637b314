from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import pytest
from matplotlib.image import imread

from effml.report import CheckOutcome, Metric, Page, Result, bar_chart

VOID = {"meta", "link", "img", "br", "hr"}
EVIL = "<script>alert('x')</script> & \"quoted\" `code <b>`"


class Tree(HTMLParser):
    """Collects tags and text, and fails on a tag that is not closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.text, self.styles = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.styles if self.open[-1:] == ["style"] else self.text).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def figure():
    return bar_chart({"a": 1.0}, xlabel="seconds")


@pytest.fixture(scope="module")
def page(figure):
    result = Result(
        method="m", preset="cpu", seeds=(0, 1), command=f"effml run {EVIL}", versions={"jax": EVIL}
    )
    page = Page(f"Title {EVIL}", f"Summary {EVIL}", claim=[f"First {EVIL}", "Second"])
    page.add_metrics([Metric(EVIL, EVIL, EVIL, "good"), Metric(8400, "tokens per second")])
    page.add_checks(
        [
            CheckOutcome(EVIL, 1.0, "<=", 2.0, True, EVIL),
            CheckOutcome("other", 3.0, "<=", 2.0, False, ""),
        ]
    )
    page.add_heading(EVIL).add_text(f"One {EVIL}\n\nTwo").add_heading("Same").add_heading("Same")
    page.add_table([{EVIL: EVIL, "n": 2.0}, {EVIL: "b", "n": 1.0}], caption=EVIL, best={"n": "min"})
    page.add_figure(figure, alt=f"Bars {EVIL}", caption=EVIL).add_code("\n" + EVIL, caption=EVIL)
    return page.set_provenance(result)


@pytest.fixture(scope="module")
def tree(page):
    return Tree(page.html())


def test_the_page_is_balanced_html5_with_language_viewport_and_title(page, tree):
    assert page.html().startswith('<!DOCTYPE html>\n<html lang="en">')
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in tree.all("meta")
    assert {"charset": "utf-8"} in tree.all("meta")
    assert len(tree.all("title")) == len(tree.all("h1")) == 1


def test_nothing_is_fetched_and_nothing_runs(page, tree):
    assert not tree.all("script")
    assert not re.search(r"https?:|//|url\(|@import", page.html().replace("base64,//", "").split("<body>")[0])
    for tag, attributes in tree.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)


def test_text_from_outside_is_escaped_everywhere(page, tree):
    assert "<script" not in page.html()
    assert not tree.all("b")
    shown = "".join(tree.text)
    # title twice (head and body), summary, claim, 3 in the metric, check and its source, heading and its link,
    # text, caption of table, header, cell, caption of figure and of code, the code, command, version
    assert shown.count("<script>alert('x')</script> & \"quoted\"") == 20
    assert {"aria-label": EVIL}.items() <= tree.all("div")[-1].items()


def test_pictures_are_inlined_pngs_with_size_and_alt(tree):
    (image,) = tree.all("img")
    kind, data = image["src"].split(",")
    assert kind == "data:image/png;base64"
    height, width, _ = imread(io.BytesIO(base64.b64decode(data)), format="png").shape
    assert (image["width"], image["height"]) == (str(width), str(height))
    assert image["alt"] == f"Bars {EVIL}"


def test_claim_comes_first_then_what_was_measured(page):
    body = page.html().split("<body>")[1]
    places = [
        body.index(text)
        for text in ("<h1>", "What was claimed", '<h2 id="what-was-measured">', "metric good")
    ]
    assert places == sorted(places)
    assert body.index("metric good") < body.index("<table>")


def test_headings_have_unique_anchors_and_the_contents_link_to_them(tree):
    anchors = [attributes["id"] for attributes in tree.all("h2") if "id" in attributes]
    assert len(set(anchors)) == len(anchors) == 4
    assert [link["href"] for link in tree.all("a")] == [f"#{anchor}" for anchor in anchors]


def test_a_table_scrolls_within_itself_and_its_heads_have_scope(tree):
    assert any(
        attributes.get("class") == "scroll" and attributes.get("tabindex") == "0"
        for attributes in tree.all("div")
    )
    assert [attributes["scope"] for attributes in tree.all("th")] == ["col", "col", "row", "row"]
    css = "".join(tree.styles)
    assert re.search(r"\.scroll \{[^}]*overflow-x: auto", css)
    assert re.search(r"pre \{[^}]*white-space: pre-wrap", css)


def test_dark_mode_and_print_are_styled(tree):
    css = "".join(tree.styles)
    assert "prefers-color-scheme: dark" in css
    assert "@media print" in css
    assert css.count("{") == css.count("}")


def test_checks_say_in_words_whether_they_hold(page):
    assert page.html().index("✓ holds") < page.html().index("✗ does not hold")
    assert "measured 3.000, wanted ≤ 2" in page.html()


def test_the_best_cell_is_strong(page):
    assert '<td class="number"><strong>1.0</strong></td>' in page.html()


def test_code_keeps_every_character(page):
    assert "<pre>\n\n&lt;script&gt;" in page.html()


def test_the_footer_says_how_it_was_measured(tree):
    text = "".join(tree.text)
    for part in ("effml run", "0, 1", "How this was measured", "UTC"):
        assert part in text[text.index("How this was measured") :]


def test_characters_that_html_forbids_are_replaced(tmp_path):
    page = Page("t\x00").add_code("a\x1b[31m\ud800b\tc\r\nd").save(tmp_path / "deep" / "report.html")
    text = page.read_text(encoding="utf-8")
    assert "a\ufffd[31m\ufffdb\tc\nd" in text
    Tree(text)


def test_an_empty_page_is_valid():
    tree = Tree(Page("Only a title").html())
    assert not tree.all("nav")
    assert not tree.all("footer")


def test_a_figure_that_is_no_png_or_has_no_alt_is_refused(figure):
    with pytest.raises(ValueError, match="PNG bytes"):
        Page("t").add_figure(b"GIF89a", alt="x")
    with pytest.raises(ValueError, match="alt must say"):
        Page("t").add_figure(figure, alt=" ")
