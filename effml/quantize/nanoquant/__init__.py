"""NanoQuant: weights of about one bit and below, as products of two binary factors."""

from __future__ import annotations

from effml.quantize.nanoquant._factorise import (
    SCHEDULES,
    BinaryFactors,
    dbf_admm,
    dual_svid,
    lb_admm,
    onebit_svid,
    reconstruct,
    sign_row_scale,
    svid,
    weighted_error,
)
from effml.quantize.nanoquant._linear import (
    BinaryTensor,
    NanoQuantLinear,
    factor_linear,
    moded_linear,
    open_linear,
    open_signs,
    sign_ste,
)
from effml.quantize.nanoquant._memory import model_bytes
from effml.quantize.nanoquant._model import (
    BinaryConfig,
    binary_linear,
    binary_params,
    check_binary_params,
    forward,
    stored_tensors,
)
from effml.quantize.nanoquant._quantize import (
    INITIALISERS,
    NanoQuantConfig,
    NanoQuantPlan,
    NanoQuantRow,
    QuantizedModel,
    plan,
    quantize_lm,
)
from effml.quantize.nanoquant._rank import bits_per_weight, nanoquant_rank
from effml.quantize.nanoquant._reconstruct import BlockTuning, adam, reconstruct_block
from effml.quantize.nanoquant._statistics import collect_diag_stats, shrink
from effml.quantize.nanoquant._tune_scales import TunedScales, scale_labels, tune_scales_kl

__all__ = [
    "INITIALISERS",
    "SCHEDULES",
    "BinaryConfig",
    "BinaryFactors",
    "BinaryTensor",
    "BlockTuning",
    "NanoQuantConfig",
    "NanoQuantLinear",
    "NanoQuantPlan",
    "NanoQuantRow",
    "QuantizedModel",
    "TunedScales",
    "adam",
    "binary_linear",
    "binary_params",
    "bits_per_weight",
    "check_binary_params",
    "collect_diag_stats",
    "dbf_admm",
    "dual_svid",
    "factor_linear",
    "forward",
    "lb_admm",
    "moded_linear",
    "model_bytes",
    "nanoquant_rank",
    "onebit_svid",
    "open_linear",
    "open_signs",
    "plan",
    "quantize_lm",
    "reconstruct",
    "reconstruct_block",
    "scale_labels",
    "shrink",
    "sign_row_scale",
    "sign_ste",
    "stored_tensors",
    "svid",
    "tune_scales_kl",
    "weighted_error",
]
