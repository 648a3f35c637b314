"""The stage of one bit: it runs on what the stages before it left, and shows what it measured."""

from types import SimpleNamespace

import jax
import pytest

from effml import data, models, report
from effml.nn import transformer
from effml.pipeline import PipelineConfig, evaluate_model
from effml.pipeline.compression import CompressionResult
from effml.pipeline.one_bit import compress_to_one_bit
from effml.pipeline.runner import PipelineRun
from effml.pipeline.stages import EvaluationResult, TextResult, TrainingResult
from tests.quantize.small import quickly_compiled

MODEL = transformer.TransformerConfig(256, 16, 1, 2, 16, mlp="gelu", max_length=128)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("pipeline")
    text = out / "text"
    text.mkdir()
    for part in range(12):
        lines = (
            f"line {number} of part {part} says hello to everyone who reads it.\n" for number in range(40)
        )
        (text / f"{part}.txt").write_text("".join(lines))
    corpus = data.load_corpus(str(text))
    params = transformer.init_params(jax.random.key(0), MODEL)
    # Larger weights than those of a fresh model, so that what becomes of them matters.
    params["layers"] = jax.tree.map(lambda x: x * 5, params["layers"])
    models.save(out / "adamw", params, MODEL, data.ByteTokenizer(), extra={"trained_length": 16})
    with quickly_compiled():
        whole = evaluate_model(models.load(out / "adamw"), corpus, max_tokens=128)
        four = {"rtn": whole, "respinquant": whole}
        speeds = dict.fromkeys(("float32", *four), 1.0)
        of = {
            TextResult: SimpleNamespace(corpus=corpus),
            TrainingResult: SimpleNamespace(
                models={"adamw": SimpleNamespace(config=SimpleNamespace(evaluation_tokens=128))}
            ),
            EvaluationResult: SimpleNamespace(
                best="adamw", folders={"adamw": out / "adamw"}, models={"adamw": whole}
            ),
            CompressionResult: CompressionResult("adamw", whole, four, speeds, {}),
        }
        config = PipelineConfig(preset="smoke", out=out)
        return out, whole, compress_to_one_bit(PipelineRun(config, of))


def test_its_model_is_on_disk_as_it_was_scored(finished):
    out, whole, stage = finished
    loaded = models.load(out / "adamw-nanoquant")
    assert (loaded.kind, loaded.config.partial) == ("binary", False)
    numbers = stage.summary()
    assert loaded.bytes_on_disk == stage.binary.bytes_on_disk == numbers["nanoquant_bytes_on_disk"]
    assert numbers["nanoquant_bits_per_weight"] == loaded.config.bits_per_weight
    assert numbers["nanoquant_nats_lost"] == pytest.approx(stage.binary.nats_per_token - whole.nats_per_token)


def test_roundings_score_as_their_packed_models_do(finished):
    out, _, stage = finished
    corpus = data.load_corpus(str(out / "text"))
    for name in ("rtn", "gptq"):
        packed = evaluate_model(models.load(out / f"adamw-w4-{name}"), corpus, max_tokens=128)
        scored = stage.rounded[f"{name} W4"]
        assert scored.nats_per_token == pytest.approx(packed.nats_per_token, rel=1e-5)
        assert scored.bytes_on_disk == packed.bytes_on_disk


def test_every_model_is_a_row_and_a_point(finished):
    _, _, stage = finished
    names = ["float32", "rtn W4A4", "respinquant W4A4", "rtn W4", "gptq W4", stage.name]
    assert [row["model"] for row in stage.rows()] == names
    assert stage.rows()[-1]["writing (tokens/s)"] > 0
    assert report.figures.figure_png(stage.figure())[:4] == b"\x89PNG"
    page = report.Page("x")
    stage.add_to(page)
    assert "two matrices of signs" in page.html()
