"""The main job: train language models on real text, measure them, compress the best, let it write, report it all.

The job is a list of stages. Each stage takes the run so far and returns a typed result that knows how to show
itself on the report; a later stage asks for an earlier result by its type. A new stage is a function and a result
class, and one more entry in `STAGES`.

    >>> [stage.__name__ for stage in STAGES[:4]]
    ['read_text', 'train_optimizers', 'measure_models', 'compress_best']
    >>> [stage.__name__ for stage in STAGES[4:]]
    ['compress_to_one_bit', 'serve_best', 'train_ssa', 'serve_ssa']
"""

from __future__ import annotations

from effml.pipeline.compression import CompressionResult
from effml.pipeline.evaluation import Evaluation, evaluate_model
from effml.pipeline.runner import PipelineConfig, PipelineRun, Stage, StageResult, run_pipeline
from effml.pipeline.stages import STAGES
from effml.pipeline.training import LEARNING_RATES, TrainConfig, TrainedModel, train_model

__all__ = [
    "LEARNING_RATES",
    "STAGES",
    "CompressionResult",
    "Evaluation",
    "PipelineConfig",
    "PipelineRun",
    "Stage",
    "StageResult",
    "TrainConfig",
    "TrainedModel",
    "evaluate_model",
    "run_pipeline",
    "train_model",
]
