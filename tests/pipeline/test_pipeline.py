"""The main job: stages, their typed results, the report and what lies beside it."""

import dataclasses
import json
from html.parser import HTMLParser

import pytest

from effml import models, report
from effml.pipeline import STAGES, PipelineConfig, run_pipeline
from effml.pipeline.stages import EvaluationResult, TextResult, TrainingResult
from tests.quantize.small import quickly_compiled


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = PipelineConfig(preset="smoke", out=tmp_path_factory.mktemp("pipeline") / "run", sample_tokens=16)
    with quickly_compiled():
        return config, run_pipeline(config)


def test_every_optimizer_is_a_row_with_its_cost(finished):
    _, result = finished
    assert [row["optimizer"] for row in result.rows] == ["adamw", "muon", "normuon", "scale"]
    assert all(row["held-out loss (nats/token)"] > 0 for row in result.rows)


def test_result_file_is_the_returned_result(finished):
    config, result = finished
    assert report.Result.load(config.out / "result.json") == result


def test_metrics_hold_every_step_of_every_optimizer(finished):
    config, _ = finished
    rows = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert [(row["optimizer"], row["step"]) for row in rows] == [
        *((name, step) for name in config.optimizers for step in range(1, 7)),
        ("ssa", 1),
        ("ssa", 2),
    ]


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.images, self.links, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "img":
            self.images.append(attrs)
        self.links += [value for name, value in attrs.items() if name in ("src", "href") and value]

    def handle_data(self, data):
        self.words.append(data)


def test_report_is_one_file_with_pictures_and_a_sample(finished):
    config, _ = finished
    reader = Reader()
    reader.feed((config.out / "report.html").read_text(encoding="utf-8"))
    assert len(reader.images) == 5
    assert (config.out / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in reader.images)
    assert all(link.startswith(("data:", "#")) for link in reader.links)
    words = " ".join(reader.words)
    for expected in (
        "def ",
        "adamw",
        "held-out loss",
        "tokens/s",
        "greedy",
        "nanoquant",
        "gptq W4",
        "ffd and esp",
    ):
        assert expected in words


def test_saved_models_score_as_they_did_in_training(finished):
    config, result = finished
    for name in config.optimizers:
        assert result.summary[f"{name}_saved_nats_per_byte"] == pytest.approx(
            result.summary[f"{name}_held_out"], rel=1e-3
        )


def test_the_best_model_is_packed_into_four_bits_and_read_back(finished):
    config, result = finished
    best = min(config.optimizers, key=lambda name: result.summary[f"{name}_saved_nats_per_byte"])
    whole = models.load(str(config.out / best / "model"))
    for method in ("rtn", "respinquant"):
        packed = models.load(str(config.out / f"{best}-w4a4-{method}"))
        assert packed.kind == "packed"
        assert packed.config.activation_bits == packed.config.weight_bits == 4
        assert packed.extra == whole.extra
        assert result.summary[f"{method}_bytes_on_disk"] == packed.bytes_on_disk < whole.bytes_on_disk
        lost = result.summary[f"{method}_nats_per_token"] - result.summary[f"{best}_held_out"]
        assert result.summary[f"{method}_nats_lost"] == pytest.approx(lost, abs=1e-3)
        assert abs(lost) < 0.1  # after six steps of training there is little to lose
        assert result.summary[f"{method}_writing_tokens_per_second"] > 0
    assert "The best model in four bits" in (config.out / "report.html").read_text(encoding="utf-8")


def test_every_way_of_reading_and_writing_is_in_the_summary(finished):
    config, result = finished
    numbers = result.summary
    assert models.load(str(config.out / "ssa" / "model")).kind == "ssa"
    dense = numbers["read_dense_bytes_per_token"]
    for name in ("ssa", "ffd", "ffd_delta_2"):
        assert 0 < numbers[f"read_{name}_bytes_per_token"] < dense
        assert 0 < numbers[f"read_{name}_kept"] <= 1
        assert 0 <= numbers[f"read_{name}_agreement"] <= 1
        lost = numbers[f"read_{name}_nats_per_token"] - numbers["read_dense_nats_per_token"]
        assert numbers[f"read_{name}_nats_lost"] == pytest.approx(lost)
    assert numbers["read_ffd_delta_2_kept"] <= numbers["read_ffd_kept"]
    assert numbers["write_dense_tokens_per_pass"] == numbers["write_esp_same"] == 1
    for name in ("esp", "ffd_and_esp"):
        saved = 1 - 1 / numbers[f"write_{name}_tokens_per_pass"]
        assert numbers[f"write_{name}_calls_saved"] == pytest.approx(saved)


def test_the_time_of_every_stage_is_told(finished):
    _, result = finished
    seconds = [result.summary[f"{stage.__name__}_stage_seconds"] for stage in STAGES]
    assert min(seconds) >= 0
    assert 0.8 * result.seconds < sum(seconds) <= result.seconds


def test_checks_are_judged_only_on_what_was_run(finished, tmp_path):
    _, result = finished
    assert len(result.checks) == 6  # all but the one that needs a rounding to two bits
    alone = run_pipeline(
        PipelineConfig(preset="smoke", optimizers=("scale",), steps=2, out=tmp_path / "run"), STAGES[:3]
    )
    assert alone.checks == []


@dataclasses.dataclass(frozen=True)
class Extra:
    text: TextResult

    def add_to(self, page):
        page.add_text("an extra stage was here")

    def metrics(self):
        return []

    def summary(self):
        return {"extra": 1.0}


def test_a_stage_is_added_without_touching_the_others(tmp_path):
    def extra(run):
        """An extra stage."""
        with pytest.raises(KeyError, match="EvaluationResult"):
            run.result(EvaluationResult)
        return Extra(run.result(TextResult))

    config = PipelineConfig(preset="smoke", optimizers=("scale",), steps=2, out=tmp_path / "run")
    result = run_pipeline(config, stages=(STAGES[0], extra, STAGES[1]))
    assert result.summary["extra"] == 1.0
    assert "an extra stage was here" in (config.out / "report.html").read_text()
    assert TrainingResult is not None


def test_a_second_run_replaces_the_first_and_nothing_else(tmp_path):
    config = PipelineConfig(
        preset="smoke", optimizers=("scale",), steps=2, out=tmp_path / "run", sample_tokens=4
    )
    run_pipeline(config, STAGES[:2])
    run_pipeline(config, STAGES[:2])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not from effml pipeline"):
        run_pipeline(dataclasses.replace(config, out=tmp_path / "mine"))
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "smok"}, "did you mean 'smoke'"),
        ({"optimizers": ("adam",)}, "did you mean 'adamw'"),
        ({"optimizers": ()}, "empty"),
        ({"optimizers": ("scale", "scale")}, "twice"),
        ({"steps": 0}, "steps"),
        ({"prompt": ""}, "prompt"),
        ({"sample_tokens": 0}, "sample_tokens"),
    ],
)
def test_bad_settings_are_refused_at_once(changes, words):
    with pytest.raises(ValueError, match=words):
        PipelineConfig(**changes)
