"""Writing text with a trained model: greedy or sampled, in batches, streamed to a terminal, or in a chat.

>>> import jax
>>> from effml import decode
>>> decode.SamplingConfig(temperature=0.8, top_p=0.95).greedy
False
"""

from __future__ import annotations

from effml.decode.chat import StopTexts, render_chat
from effml.decode.generation import Generation, TextStream, generate, pad_prompts, stream, stream_text
from effml.decode.sampling import SamplingConfig, filter_logits, sample

__all__ = [
    "Generation",
    "SamplingConfig",
    "StopTexts",
    "TextStream",
    "filter_logits",
    "generate",
    "pad_prompts",
    "render_chat",
    "sample",
    "stream",
    "stream_text",
]
