"""Which files a corpus reads, and how it splits them."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effml.data import Corpus, load_corpus, source_files

names = st.text("abcdé-_ 0", min_size=1, max_size=8).map(str.strip).filter(bool)


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def numbered(folder: Path, count: int) -> Path:
    return write(folder, {f"{i:03}.txt": f"text number {i}\n" for i in range(count)})


def sides(corpus: Corpus) -> tuple[dict[str, str], dict[str, str]]:
    return dict(corpus.text("train")), dict(corpus.text("held_out"))


def test_stdlib_is_python_sources_without_tests_and_installed_packages():
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in source_files("stdlib")]
    assert len(files) > 300
    assert {path.suffix for path in files} == {".py"}
    assert not {"site-packages", "test", "tests", "__pycache__"} & {
        part for path in files for part in path.parts
    }
    assert not [path for path in files if path.name.startswith("_sysconfigdata")]
    assert Path("argparse.py") in files
    assert files == sorted(files, key=Path.as_posix)


def test_every_text_file_is_read_whatever_its_suffix_and_nothing_else(tmp_path):
    write(
        tmp_path,
        {
            "b/notes.md": "notes",
            "a.txt": "one",
            "Makefile": "all:\n",
            "ünï/码.txt": "non-ASCII name",
            "image.png": b"\x89PNG\0\0",
            "latin.txt": "caf\xe9".encode("latin-1"),
            "wide.txt": "wide".encode("utf-16"),
            "empty.txt": "",
            "blank.txt": " \n\t\n",
            ".git/config": "hidden folder",
            ".hidden": "hidden file",
        },
    )
    found = [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)]
    assert found == ["Makefile", "a.txt", "b/notes.md", "ünï/码.txt"]
    corpus = load_corpus(tmp_path)
    assert dict(corpus.skipped) == {"binary": 1, "UTF-16": 1, "not UTF-8": 1, "empty": 2}
    assert "1 not UTF-8" in corpus.describe()


def test_links_that_loop_pipes_and_unreadable_files_are_counted_and_skipped(tmp_path):
    numbered(tmp_path, 3)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    corpus = load_corpus(tmp_path)
    assert len(corpus.train) + len(corpus.held_out) == 3
    assert dict(corpus.skipped) == {"linked folder": 1, "unreadable": 2, "not a regular file": 1}


def test_windows_newlines_and_byte_order_mark_are_normalised(tmp_path):
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\r\ntwo\rthree\n", "b.txt": "other"})
    train, held_out = sides(load_corpus(tmp_path))
    assert (train | held_out)["a.txt"] == "one\ntwo\nthree\n"


def test_adding_files_moves_none_of_the_others(tmp_path):
    before = load_corpus(numbered(tmp_path, 60), held_out_fraction=0.3)
    write(tmp_path, {f"new/{i}.txt": f"new text {i}" for i in range(40)})
    after = load_corpus(tmp_path, held_out_fraction=0.3)
    assert before.held_out
    assert set(before.train) <= set(after.train)
    assert set(before.held_out) <= set(after.held_out)


def test_the_split_does_not_depend_on_where_the_folder_is(tmp_path):
    one, two = numbered(tmp_path / "one", 30), numbered(tmp_path / "two/deeper", 30)
    assert sides(load_corpus(one)) == sides(load_corpus(two))


def test_the_share_of_held_out_files_is_the_fraction(tmp_path):
    corpus = load_corpus(numbered(tmp_path, 1000), held_out_fraction=0.2)
    # Binomial(1000, 0.2): standard deviation 12.6, so five of them are 63.
    assert abs(len(corpus.held_out) - 200) < 63


def test_a_larger_fraction_only_adds_held_out_files(tmp_path):
    numbered(tmp_path, 50)
    small, large = (load_corpus(tmp_path, held_out_fraction=fraction) for fraction in (0.1, 0.4))
    assert set(small.held_out) < set(large.held_out)


@settings(max_examples=60, deadline=None)
@given(
    files=st.dictionaries(
        names, st.sampled_from("abcdefgh") | st.text("xyz\n", min_size=1), min_size=2, max_size=12
    ),
    fraction=st.floats(0.001, 0.999),
)
def test_sides_are_disjoint_by_file_and_by_content_and_never_empty(tmp_path_factory, files, fraction):
    folder = write(tmp_path_factory.mktemp("corpus"), files)
    contents = {text for text in files.values() if text.strip()}
    if len(contents) < 2:
        return
    train, held_out = sides(load_corpus(folder, held_out_fraction=fraction))
    assert train
    assert held_out
    assert not set(train) & set(held_out)
    assert not set(train.values()) & set(held_out.values())
    assert sorted([*train.values(), *held_out.values()]) == sorted(contents)


def test_a_copy_does_not_move_text_from_training_to_held_out(tmp_path):
    before = load_corpus(numbered(tmp_path, 40), held_out_fraction=0.5)
    trained = {text for _, text in before.text("train")}
    write(tmp_path, {f"copies/{i}.txt": text for i, text in enumerate(sorted(trained))})
    assert trained <= {text for _, text in load_corpus(tmp_path, held_out_fraction=0.5).text("train")}


def test_one_file_is_cut_at_a_line_end(tmp_path):
    lines = [f"line {i}\n" for i in range(100)]
    path = write(tmp_path, {"one.txt": "".join(lines)}) / "one.txt"
    for source in (path, tmp_path):
        train, held_out = sides(load_corpus(source, held_out_fraction=0.2))
        assert train["one.txt"] + held_out["one.txt"] == "".join(lines)
        assert train["one.txt"].endswith("\n")
        assert abs(len(held_out["one.txt"].splitlines()) - 20) <= 1


def test_one_line_is_cut_between_characters(tmp_path):
    path = write(tmp_path, {"one.txt": "é" * 10}) / "one.txt"
    assert [len(text) for side in sides(load_corpus(path)) for text in side.values()] == [9, 1]


@pytest.mark.parametrize("max_bytes", [60, 1000, 4096])
def test_max_bytes_bounds_the_text_and_is_deterministic(tmp_path, max_bytes):
    write(tmp_path, {f"{i}.txt": f"{i} ünïcode line\n" * 20 for i in range(30)})
    corpus = load_corpus(tmp_path, max_bytes=max_bytes, held_out_fraction=0.4)
    assert all(text.endswith("\n") for side in sides(corpus) for text in side.values())
    train, held_out = ["".join(side.values()).encode() for side in sides(corpus)]
    assert corpus == load_corpus(tmp_path, max_bytes=max_bytes, held_out_fraction=0.4)
    assert 0 < len(held_out) <= 0.4 * max_bytes
    assert 0.5 * max_bytes < len(train) + len(held_out) <= max_bytes
    whole = load_corpus(tmp_path, held_out_fraction=0.4)
    assert set(corpus.train) <= set(whole.train)


def test_max_bytes_cuts_a_single_file(tmp_path):
    path = write(tmp_path, {"one.txt": "0123456789\n" * 100}) / "one.txt"
    train, held_out = sides(load_corpus(path, max_bytes=120))
    assert train["one.txt"] + held_out["one.txt"] == "0123456789\n" * 10


def test_a_file_that_changes_later_is_noticed(tmp_path):
    corpus = load_corpus(numbered(tmp_path, 5))
    corpus.train[0].write_text("something else")
    with pytest.raises(ValueError, match="changed since the corpus was loaded"):
        list(corpus.text("train"))


def test_fingerprint_follows_content(tmp_path):
    first = load_corpus(numbered(tmp_path, 5)).fingerprint
    assert load_corpus(tmp_path).fingerprint == first
    (tmp_path / "000.txt").write_text("something else")
    assert load_corpus(tmp_path).fingerprint != first


def test_the_split_is_the_same_in_every_process(tmp_path):
    numbered(tmp_path, 30)
    code = (
        "import sys; from effml.data import load_corpus; c = load_corpus(sys.argv[1], max_bytes=300);"
        "print([p.name for p in c.train], [p.name for p in c.held_out], c.fingerprint)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_importing_the_package_loads_no_heavy_package():
    code = (
        "import sys, effml.data;"
        "print([m for m in ('jax', 'grain', 'tokenizers', 'torch') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


class TestBadInput:
    def test_missing_folder_suggests_the_nearest(self, tmp_path):
        (tmp_path / "books").mkdir()
        with pytest.raises(ValueError, match=r"boks' does not exist; did you mean 'books'\?"):
            load_corpus(tmp_path / "boks")
        with pytest.raises(ValueError, match="did you mean 'stdlib'"):
            load_corpus("stdlb")

    @pytest.mark.parametrize("load", [load_corpus, source_files])
    def test_empty_folder(self, tmp_path, load):
        with pytest.raises(ValueError, match=r"holds no UTF-8 text \(found no files\)"):
            load(tmp_path)

    @pytest.mark.parametrize("load", [load_corpus, source_files])
    def test_folder_of_binary_files(self, tmp_path, load):
        write(tmp_path, {"a.bin": b"\0\1", "b.bin": b"\0\2", "c.txt": ""})
        with pytest.raises(ValueError, match=r"found 2 binary, 1 empty"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(b"", "empty"), (b"\0", "binary"), (b"\xff", "not UTF-8"), ("é".encode("utf-16"), "UTF-16")],
    )
    def test_one_unusable_file(self, tmp_path, content, reason):
        path = write(tmp_path, {"x": content}) / "x"
        with pytest.raises(ValueError, match=rf"x' is {reason}"):
            load_corpus(path)

    def test_pipe_as_source_does_not_hang(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="neither a folder nor a regular file"):
            load_corpus(tmp_path / "pipe")

    def test_text_of_one_character(self, tmp_path):
        with pytest.raises(ValueError, match="too short to split"):
            load_corpus(write(tmp_path, {"x": "a"}) / "x")

    def test_empty_name(self):
        with pytest.raises(ValueError, match="data source is empty"):
            load_corpus("")

    def test_number_as_source(self):
        with pytest.raises(TypeError):
            load_corpus(3)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
    def test_held_out_fraction_out_of_range(self, tmp_path, fraction):
        with pytest.raises(ValueError, match=r"held_out_fraction=.* above 0 and below 1"):
            load_corpus(numbered(tmp_path, 3), held_out_fraction=fraction)

    @pytest.mark.parametrize("max_bytes", [0, -5])
    def test_max_bytes_must_be_positive(self, tmp_path, max_bytes):
        with pytest.raises(ValueError, match=f"max_bytes={max_bytes} must be above 0"):
            load_corpus(numbered(tmp_path, 3), max_bytes=max_bytes)

    @pytest.mark.parametrize("files", [1, 5])
    def test_max_bytes_too_small_for_two_sides(self, tmp_path, files):
        with pytest.raises(ValueError, match="max_bytes=1 must be at least 2"):
            load_corpus(numbered(tmp_path, files), max_bytes=1)
        write(tmp_path, {f"{i:03}.txt": "猫" * (i + 5) for i in range(files)})
        with pytest.raises(ValueError, match="with max_bytes=3 is too short: no text is left on the"):
            load_corpus(tmp_path, max_bytes=3)

    def test_unknown_split_suggests_the_nearest(self, tmp_path):
        with pytest.raises(ValueError, match="did you mean 'held_out'"):
            load_corpus(numbered(tmp_path, 3)).documents("heldout")
