"""The batch iterator as a grain iterator, for code that checks for one or checkpoints it through orbax."""

from __future__ import annotations

import grain

from effml.data.packing import Batch, ResumableBatches, WindowBatches

__all__ = ["GrainBatches"]


class GrainBatches(ResumableBatches, grain.DatasetIterator):
    """`ResumableBatches` with the rest of grain's iterator interface: close, save, load."""

    def __init__(self, source: WindowBatches):
        grain.DatasetIterator.__init__(self)
        ResumableBatches.__init__(self, source)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        return super().__next__()
