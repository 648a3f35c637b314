"""Files and folders of models: their bytes are those that were written, their modes those that the umask allows."""

import json
import os
import stat

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from effml import models
from effml.nn.hub import _files
from tests.quantize import small

TENSORS = {
    "a.codes": np.arange(256, dtype=np.uint8).reshape(16, 16),
    "a.scale": jnp.linspace(0, 1, 40, dtype=jnp.bfloat16),
    "b": np.float32(2.5),
    "none": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def path(tmp_path):
    _files.write_safetensors(tmp_path / "model.safetensors", TENSORS, {"about": "a test"})
    return tmp_path / "model.safetensors"


def test_every_tensor_comes_back_with_its_shape_and_type(path):
    stored = _files.SafeTensors([path], types=None)
    for name, tensor in TENSORS.items():
        read = stored.read(name)
        assert (read.shape, read.dtype) == (tensor.shape, tensor.dtype)
        np.testing.assert_array_equal(read, tensor)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["about"] == "a test"


def test_a_flipped_bit_of_a_tensor_is_not_believed(path):
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin, len(whole), 7):
        content = bytearray(whole)
        content[place] ^= 4
        path.write_bytes(content)
        stored = _files.SafeTensors([path], types=None)
        with pytest.raises(ValueError, match=r"tensor '.*' is not what was written"):
            [stored.read(name) for name in TENSORS]


@pytest.mark.parametrize(
    ("old", "new"), [(b'"BF16"', b'"F16" '), (b"[16,16]", b"[8,32] "), (b"a.codes", b"c.codes")]
)
def test_a_header_that_lies_is_not_believed(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    stored = _files.SafeTensors([path], types=None)
    with pytest.raises(ValueError, match=r"tensor '.*' is not what was written"):
        [stored.read(name) for name in stored.shapes]


def test_a_tensor_that_is_gone_from_the_header_is_missed(path):
    (size,), content = np.frombuffer(path.read_bytes()[:8], "<u8"), path.read_bytes()
    header = json.loads(content[8 : 8 + int(size)])
    header["__metadata__"]["effml.crc32"] = header["__metadata__"]["effml.crc32"][8:]
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + int(size) :])
    with pytest.raises(ValueError, match="the checksums are not those of its tensors"):
        _files.SafeTensors([path], types=None)


def test_files_of_others_need_no_checksums(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "theirs.safetensors")
    assert _files.SafeTensors([tmp_path / "theirs.safetensors"]).read("a").tolist() == [1, 1, 1]


def test_a_dense_model_with_a_flipped_bit_is_refused(tmp_path):
    models.save(tmp_path / "m", small.params(), small.CONFIG)
    small.flipped(tmp_path / "m" / "model.safetensors", 0.7)
    with pytest.raises(ValueError, match="is not what was written"):
        models.load(tmp_path / "m")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_modes_follow_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        models.save(tmp_path / "m", small.params(), small.CONFIG)
        models.save(tmp_path / "m", small.params(), small.CONFIG)  # in place of the first
    finally:
        os.umask(before)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "m").iterdir()}
    assert modes == dict.fromkeys(("effml.json", "model.safetensors"), 0o666 & ~mask)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o777 & ~mask


def test_a_file_that_can_t_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match=r"m.safetensors can't be written: No space left"):
        _files.write_safetensors(tmp_path / "m.safetensors", TENSORS)
    assert list(tmp_path.iterdir()) == []
