"""What `ffd_decode` refuses, before anything is traced; what it says of this machine; its benchmark's byte model."""

import json
import math

import numpy as np
import pytest

from pallas_kernels import ffd_decode as op
from pallas_kernels.ffd_decode import bench
from tests.kernels.ffd_cases import case

GOOD = {name: np.asarray(x) for name, x in case(0).items()}


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "q must have 3 or 4 axes", {"q": np.zeros((2, 6), "f")}),
        (TypeError, "q must be float32 or bfloat16, not float16", {"q": GOOD["q"].astype("e")}),
        (ValueError, "q has 5 heads, which is no multiple of the 2 heads", {"q": GOOD["q"][:, :5]}),
        (TypeError, "k_code must be uint8, not int32", {"k_code": GOOD["k_code"].astype("i")}),
        (ValueError, r"k_code must have shape \(2, 2, 80, 16\)", {"bits": 4}),
        (ValueError, "bits=3 must be one of 2, 4", {"bits": 3}),
        (
            ValueError,
            "80 keys and k_scale 3 blocks: .* multiple of 8",
            {"k_scale": GOOD["k_scale"][:, :, :3]},
        ),
        (ValueError, "80 keys and k_scale 40 blocks", {"k_scale": np.zeros((2, 2, 40, 32), "f")}),
        (TypeError, "k_scale must be float32", {"k_scale": GOOD["k_scale"].astype("e")}),
        (TypeError, "k_resid must be floating", {"k_resid": np.zeros((2, 2, 80, 32), "i")}),
        (ValueError, "v must have shape", {"v": GOOD["v"][:, :, :79]}),
        (ValueError, "k_tail and v_tail must be given together", {"k_tail": None}),
        (ValueError, "v_tail must have shape", {"v_tail": GOOD["v_tail"][..., :3]}),
        (TypeError, "num_blocks must hold integers", {"num_blocks": np.zeros(2, "f")}),
        (ValueError, "num_blocks must be in 0..5, but holds 0 and 6", {"num_blocks": np.array([0, 6])}),
        (ValueError, "tail_len must be in 0..8, but holds -1", {"tail_len": np.array([-1, 8])}),
        (TypeError, "tail_mask must be bool", {"tail_mask": np.ones((2, 8), "i")}),
        (ValueError, r"tail_mask must have shape \(2, 8\)", {"tail_mask": np.ones((2, 7), bool)}),
        (ValueError, "delta=-1.0 must be at least 0", {"delta": -1}),
        (ValueError, "delta=nan must be at least 0", {"delta": math.nan}),
        (ValueError, "scale=0.0 must be", {"scale": 0}),
        (ValueError, "threshold='top' must be one of pseudo_fp, pseudo", {"threshold": "top"}),
        (ValueError, r"threshold must have shape \(2, 6\)", {"threshold": np.zeros((2, 5), "f")}),
        (ValueError, "num_splits=0 must be an int from 1", {"num_splits": 0}),
        (ValueError, "implementation='cuda' is not known", {"implementation": "cuda"}),
        (
            NotImplementedError,
            "no NVIDIA GPU.*no TPU.*block=16 is no multiple of 32",
            {"implementation": "pallas"},
        ),
        (NotImplementedError, "triton: no NVIDIA GPU.*", {"implementation": "triton"}),
    ],
)
def test_bad_input(error, message, change):
    with pytest.raises(error, match=message):
        op.ffd_decode(**{**GOOD, **change})


def test_availability():
    forms = [line.split()[0] for line in op.availability()]
    assert forms == ["xla", "cpu", "pallas", "triton"]


def test_byte_model_and_command_of_the_benchmark(tmp_path, capsys):
    # 64 keys of 2 heads of 8 numbers in blocks of 16: 2 bytes of codes a key, 8 scales a block, float32 values.
    small = bench.Case(64, 0.5, heads=2, kv_heads=2, channels=8, block=16, dtype="float32")
    moved = bench.bytes_moved(small, 0.5)
    assert moved["scan"] == 2 * 64 * 2 + 2 * 4 * 8 * 4
    assert moved["kept"] == 0.5 * 2 * 64 * 8 * (1 + 4)
    assert moved["ffd"] == moved["scan"] + moved["kept"]
    assert moved["dense"] == 2 * 2 * 64 * 8 * 4
    (row,) = bench.main(["--preset", "smoke", "--out", str(tmp_path / "r.json")])
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == [row]
    assert {"ffd", "ffd_xla", "dense"} <= set(row["seconds"])
    assert 0 < row["keep_ratio"] <= 1
    assert row["relative_difference_to_dense"] < 0.1
    assert "compile" in capsys.readouterr().out
