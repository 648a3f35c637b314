"""Matrix tools that optimizers and compressors share: factorisations, Hadamard transforms, steps on rotations.

| function | what it gives | cost for [m, n], m <= n |
|---|---|---|
| `newton_schulz` | the polar factor, approximately, by matrix products alone | 5 (2 m^2 n + m^3) |
| `polar` | the exact polar factor, by a singular value decomposition | about 20 m^2 n |
| `cholesky_qr2` | an orthonormal basis of a tall matrix, by Gram matrices | 4 m k^2 |
| `rsvd` | leading singular triples by a random sketch | 4 m n k |
| `fht` | the product with a Hadamard matrix, without the matrix | m n log n |
| `cayley` | the rotation that a skew matrix generates | n^3 times 3 (exact) or 5 (fixed point) |
| `cayley_step` | one step of gradient descent on orthogonal matrices | 6 n^3 more |

Everything here is a pure function of arrays, works under `jit`, `vmap` and `grad` of a caller, and gives
finite results for zero and rank-deficient matrices. Matrices are floating-point arrays, or nested lists of floats.
"""

from __future__ import annotations

from effml.linalg._cayley import CayleyStep, cayley, cayley_step, orthogonality_error
from effml.linalg._factorisations import (
    NEWTON_SCHULZ_COEFFICIENTS,
    cholesky_qr2,
    newton_schulz,
    newton_schulz_coefficients,
    polar,
    rsvd,
)
from effml.linalg._hadamard import fht, hadamard, hadamard_order, hadamard_sizes

__all__ = [
    "NEWTON_SCHULZ_COEFFICIENTS",
    "CayleyStep",
    "cayley",
    "cayley_step",
    "cholesky_qr2",
    "fht",
    "hadamard",
    "hadamard_order",
    "hadamard_sizes",
    "newton_schulz",
    "newton_schulz_coefficients",
    "orthogonality_error",
    "polar",
    "rsvd",
]
