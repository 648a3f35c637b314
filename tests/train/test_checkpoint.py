from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml.train import Checkpoints, TrainState, init_state, make_step

OPTIMIZER = optax.adamw(1e-2)
METADATA = {"model": {"width": 8, "layers": [1, 2]}, "optimizer": "adamw"}


def init(key):
    return {
        "layers": [{"kernel": jax.random.normal(key, (4, 8)), "bias": jnp.arange(8, dtype=jnp.bfloat16)}],
        "codes": jnp.arange(6, dtype=jnp.uint8).reshape(2, 3) * 40,
        "sizes": (jnp.int32(-3), jnp.array([True, False])),
        "none": None,
    }


def state_at(step, seed=0, init_params=init):
    optimizer = optax.masked(OPTIMIZER, lambda p: jax.tree.map(lambda a: a.dtype == jnp.float32, p))
    state = init_state(jax.random.key(seed), init_params, optimizer)
    return state._replace(step=jnp.int32(step))


def assert_same(a: TrainState, b: TrainState):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("data_state", [{"next_index": np.int64(7), "nested": [1, None]}, b"\x00\xff", None])
def test_everything_comes_back_bit_for_bit(tmp_path, data_state):
    saved = state_at(5)
    Checkpoints(tmp_path / "run", metadata=METADATA).save(saved, data_state)
    restored, data = Checkpoints(tmp_path / "run", metadata=METADATA).restore(state_at(0, seed=1))
    assert_same(restored, saved)
    assert data == data_state
    abstract = jax.eval_shape(lambda: state_at(0))
    assert_same(Checkpoints(tmp_path / "run", metadata=METADATA).restore(abstract)[0], saved)


def test_a_restored_state_trains_on_in_the_same_program(tmp_path):
    step = make_step(lambda params, batch: jnp.sum((params - batch) ** 2), OPTIMIZER)
    state = init_state(jax.random.key(0), jnp.zeros(3), OPTIMIZER)
    state, _ = step(state, np.ones(3, np.float32))
    Checkpoints(tmp_path).save(state)
    restored, _ = Checkpoints(tmp_path).restore(state)
    for _ in range(2):
        state, _ = step(state, np.ones(3, np.float32))
        restored, _ = step(restored, np.ones(3, np.float32))
    assert_same(restored, state)


def test_the_newest_are_kept_and_any_of_them_can_be_read(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 30):
            checkpoints.save(state_at(step), {"next_index": step})
        assert checkpoints.steps() == [2, 30]
        assert checkpoints.restore(state_at(0))[1] == {"next_index": 30}
        assert checkpoints.restore(state_at(0), step=2)[1] == {"next_index": 2}
        with pytest.raises(ValueError, match=r"no checkpoint of step 1 .*only of \[2, 30\]"):
            checkpoints.restore(state_at(0), step=1)


def test_saving_a_step_again_changes_nothing_and_an_older_one_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_at(4), {"next_index": 1})
    checkpoints.save(state_at(4), {"next_index": 2})
    assert checkpoints.restore(state_at(0))[1] == {"next_index": 1}
    with pytest.raises(ValueError, match="up to step 4, past step 3"):
        checkpoints.save(state_at(3))


def test_a_half_written_checkpoint_is_not_seen_and_is_cleared_away(tmp_path):
    Checkpoints(tmp_path).save(state_at(3))
    torn = tmp_path / "6.orbax-checkpoint-tmp-17"
    torn.mkdir()
    (torn / "state").write_text("half")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest_step() == 3
    assert int(checkpoints.restore(state_at(0))[0].step) == 3
    assert not torn.exists()


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(bytes(raw))


def _forge(path):
    # Another value than was saved, in files that are whole.
    about = json.loads(path.read_text())
    about["fingerprints"]["params.layers.0.kernel"] ^= 1
    path.write_text(json.dumps(about))


def _replace(name, value):
    def damage(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return damage


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's own threads
@pytest.mark.parametrize(
    ("target", "damage"),
    [
        ("state/d/*", _truncate),
        ("state/d/*", _flip),
        ("state/d/*", lambda path: path.unlink()),
        ("state/manifest.ocdbt", _truncate),
        ("state/_METADATA", _truncate),
        ("about/metadata", _truncate),
        ("about/metadata", lambda path: path.unlink()),
        ("about/metadata", lambda path: path.write_text("{}")),
        ("about/metadata", _forge),
        ("about/metadata", _replace("fingerprints", {})),
        ("about/metadata", _replace("fingerprints", [])),
        ("about/metadata", _replace("arrays", [])),
        ("about/metadata", _replace("arrays", {"step": 5})),
        ("about/metadata", _replace("data", 5)),
        ("about/metadata", _replace("data", ["{}"])),
    ],
)
def test_damage_is_one_error_that_names_the_folder_and_the_way_on(tmp_path, target, damage):
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 9):
        checkpoints.save(state_at(step))
    checkpoints.close()
    for path in (tmp_path / "9").glob(target):
        damage(path)
    with pytest.raises(ValueError, match="is damaged") as caught:
        Checkpoints(tmp_path).restore(state_at(0))
    text = str(caught.value)
    assert str(tmp_path / "9") in text
    assert "delete that folder to go on from step 2" in text
    assert "\n" not in text
    assert int(Checkpoints(tmp_path).restore(state_at(0), step=2)[0].step) == 2


def test_a_fingerprint_sees_any_single_changed_bit_of_any_type():
    from effml.train.checkpoint import _fingerprints

    rng = np.random.default_rng(0)
    for dtype in (np.float32, jnp.bfloat16, np.float16, np.int8, np.uint32, np.bool_):
        values = rng.integers(0, 2, (3, 5)).astype(dtype)
        before = _fingerprints({"a": jnp.asarray(values)})["a"]
        raw = bytearray(values.tobytes())
        for at in range(0, len(raw), 7):
            for bit in [0] if dtype is np.bool_ else [0, 6]:
                changed = bytearray(raw)
                changed[at] ^= 1 << bit
                other = np.frombuffer(bytes(changed), values.dtype).reshape(values.shape)
                assert _fingerprints({"a": jnp.asarray(other)})["a"] != before
    swapped = {"a": jnp.asarray([2.0, 1.0])}
    assert _fingerprints(swapped) != _fingerprints({"a": jnp.asarray([1.0, 2.0])})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({**METADATA, "optimizer": "muon"}, "optimizer is 'adamw' there and 'muon' here"),
        ({**METADATA, "model": {"width": 9, "layers": [1, 2]}}, "model.width is 8 there and 9 here"),
        ({"model": METADATA["model"]}, "only the checkpoint has optimizer='adamw'"),
        ({**METADATA, "seed": 1}, "only this run has seed=1"),
    ],
)
def test_another_run_is_refused_by_what_differs(tmp_path, metadata, words):
    Checkpoints(tmp_path, metadata=METADATA).save(state_at(1))
    with pytest.raises(ValueError, match=words):
        Checkpoints(tmp_path, metadata=metadata).restore(state_at(0))
    with pytest.raises(ValueError, match=words):
        Checkpoints(tmp_path, metadata=metadata).save(state_at(2))
    assert Checkpoints(tmp_path).latest_step() == 1


def test_another_model_is_refused_by_the_array_that_differs(tmp_path):
    Checkpoints(tmp_path).save(state_at(1))

    def wider(key):
        return init(key) | {"codes": jnp.zeros((2, 4), jnp.uint8), "new": jnp.zeros(1)}

    with pytest.raises(
        ValueError, match=r"params.codes is uint8\[2, 3\] there and uint8\[2, 4\] here"
    ) as caught:
        Checkpoints(tmp_path).restore(state_at(0, init_params=wider))
    assert "params.new is absent there and float32[1] here" in str(caught.value)


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(TypeError, match="JSON types"):
        Checkpoints(tmp_path, metadata={"a": object()})
    with pytest.raises(TypeError, match="JSON types or bytes"):
        Checkpoints(tmp_path).save(state_at(1), object())
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        Checkpoints(tmp_path / "absent").restore(state_at(0))
    assert not (tmp_path / "absent").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        Checkpoints(tmp_path / "file")


FULL_DISK = """
import resource, signal, sys
import jax, jax.numpy as jnp, optax
from effml.train import Checkpoints, init_state
state = init_state(jax.random.key(0), {"w": jax.random.normal(jax.random.key(1), (100, 100))}, optax.sgd(0.1))
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(state)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    checkpoints.save(state._replace(step=jnp.int32(3)))
except OSError as error:
    assert "checkpoint of step 3 could not be written" in str(error) and "[0]" in str(error), error
    assert "\\n" not in str(error)
    assert checkpoints.steps() == [0], checkpoints.steps()
    print("one sentence")
"""


def test_a_disk_that_is_full_is_one_sentence_and_leaves_the_earlier_checkpoints(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "one sentence", done.stderr[-2000:]
    example = init_state(jax.random.key(0), {"w": jnp.zeros((100, 100))}, optax.sgd(0.1))
    restored, _ = Checkpoints(tmp_path).restore(example)
    assert int(restored.step) == 0
