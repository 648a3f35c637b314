"""Fewer bits for a trained model: calibrate, plan, apply.

>>> import jax
>>> from effml import nn, quantize
>>> config = nn.TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
>>> params = nn.transformer.init_params(jax.random.key(0), config)
>>> plan = quantize.plan(config, method="rtn", bits="W4A8")
>>> packed, packed_config, rows = quantize.apply(plan, params, config, key=jax.random.key(1))
>>> plan.bits, rows[0]["name"], packed["layers"][0]["mlp"]["down"]["packed"].shape
('W4A8', 'attention.query', (64, 32))

`forward(packed, tokens, packed_config)` runs it, and `effml.models.save(folder, packed, packed_config, kind="packed")`
writes it.
"""

from __future__ import annotations

from effml.quantize import respinquant
from effml.quantize._apply import QuantizationRows, apply
from effml.quantize._calibrate import INPUT_OF, InputStatistics, LayerStream, calibrate
from effml.quantize._fake import (
    check_bits,
    fake_quant_act,
    fake_quant_weight,
    group_count,
    round_weight,
    weight_scale,
)
from effml.quantize._folder import check_packed_params, packed_params
from effml.quantize._gptq import RoundedKernel, gptq, rtn
from effml.quantize._model import (
    PackedConfig,
    forward,
    quantized_attention,
    quantized_linear,
    quantized_residual,
    seams,
)
from effml.quantize._packed import PackedTensor, packed_bytes
from effml.quantize._plan import METHODS, PlanRow, QuantizationPlan, parse_bits, plan
from effml.quantize._work import WorkFolder

__all__ = [
    "INPUT_OF",
    "METHODS",
    "InputStatistics",
    "LayerStream",
    "PackedConfig",
    "PackedTensor",
    "PlanRow",
    "QuantizationPlan",
    "QuantizationRows",
    "RoundedKernel",
    "WorkFolder",
    "apply",
    "calibrate",
    "check_bits",
    "check_packed_params",
    "fake_quant_act",
    "fake_quant_weight",
    "forward",
    "gptq",
    "group_count",
    "packed_bytes",
    "packed_params",
    "parse_bits",
    "plan",
    "quantized_attention",
    "quantized_linear",
    "quantized_residual",
    "respinquant",
    "round_weight",
    "rtn",
    "seams",
    "weight_scale",
]
