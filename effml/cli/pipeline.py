"""Train, measure and serve a small language model on real text, and report it on one page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from effml.pipeline.runner import PipelineConfig


@dataclass(frozen=True)
class Command:
    """Options of `effml pipeline`."""

    config: Annotated[PipelineConfig, tyro.conf.arg(name="")]

    def run(self) -> int:
        """Runs the stages, prints the table and where the report is; `effml run` is what judges claims."""
        from effml import report
        from effml.pipeline import run_pipeline

        result = run_pipeline(self.config)
        report.print_result(result)
        out = self.config.out
        print(
            f"report: {out / 'report.html'}   result: {out / 'result.json'}   metrics: {out / 'metrics.jsonl'}"
        )
        return 0
