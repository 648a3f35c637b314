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
from effml.quantize.nanoquant._memory import model_bytes
from effml.quantize.nanoquant._rank import bits_per_weight, nanoquant_rank
from effml.quantize.nanoquant._statistics import collect_diag_stats, shrink

__all__ = [
    "SCHEDULES",
    "BinaryFactors",
    "bits_per_weight",
    "collect_diag_stats",
    "dbf_admm",
    "dual_svid",
    "lb_admm",
    "model_bytes",
    "nanoquant_rank",
    "onebit_svid",
    "reconstruct",
    "shrink",
    "sign_row_scale",
    "svid",
    "weighted_error",
]
