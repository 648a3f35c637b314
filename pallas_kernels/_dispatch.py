"""Which implementation of an op runs: decided when the call is traced, never by a device query inside it.

An op hands `choose` its forms, keyed by where they run:

| form | user's name | runs on |
|---|---|---|
| `xla` | `"xla"` | everywhere |
| `cpu` | `"cpu"` | CPU, native code |
| `pallas_gpu` | `"pallas"` | NVIDIA GPU of compute capability 8.0 or above |
| `pallas_tpu` | `"pallas"` | TPU |
| `triton` | `"triton"` | NVIDIA GPU, through jax-triton |

With no name given, each platform of this process takes its own form if that serves the call, and XLA otherwise; XLA
picks among them when it compiles (`jax.lax.platform_dependent`), so arrays on a CPU beside a GPU are right too. A
form is offered only for platforms that this process has, or that the abstract device of the current mesh stands for.
Without those, a program lowered on a CPU machine for a GPU holds the XLA path.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax

__all__ = ["NAMES", "available", "choose", "describe", "form_of", "platforms"]

NAMES = ("xla", "cpu", "pallas", "triton")
_FORMS = ("xla", "cpu", "pallas_gpu", "pallas_tpu", "triton")
# Every platform's forms, the better one first.
_PREFERRED = {"cpu": ("cpu",), "cuda": ("pallas_gpu",), "tpu": ("pallas_tpu",)}


def platforms() -> tuple[str, ...]:
    """The platforms that a call traced now may be compiled for, among `cpu`, `cuda`, `rocm` and `tpu`.

    The abstract device of the current mesh alone, where there is one: it says what is compiled for.

    Example:
        >>> platforms()
        ('cpu',)
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        kind = str(getattr(described, "platform", "") or described.device_kind).lower()
        return ("tpu",) if "tpu" in kind else ("cpu",) if "cpu" in kind else ("cuda",)
    from jax.extend import backend

    found = backend.backends()
    if "gpu" not in found:
        return tuple(found)
    version = getattr(found["gpu"], "platform_version", "").lower()
    return tuple(dict.fromkeys(("rocm" if "rocm" in version else "cuda") if n == "gpu" else n for n in found))


def _absent(form: str) -> str | None:
    """Why a form can't run in this process, whatever the call; None if it can."""
    here = platforms()
    if form == "xla" or (form == "cpu" and "cpu" in here):
        return None
    if form == "cpu":
        return "no CPU backend is loaded"
    if form == "pallas_tpu":
        return None if "tpu" in here else f"no TPU among this process's platforms ({', '.join(here)})"
    if "cuda" not in here:
        return f"no NVIDIA GPU among this process's platforms ({', '.join(here)})"
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is None:
        capability = getattr(jax.devices("gpu")[0], "compute_capability", "8.0")
        if float(capability) < 8.0:
            return f"compute capability {capability} is below 8.0, which Triton needs"
    if form == "triton" and importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'effml[triton]')"
    return None


def form_of(
    implementation: str | None, offered: Mapping[str, Any], reasons: Mapping[str, str] | None = None
) -> str | None:
    """The form that a named implementation means here; None if the platform decides.

    Args:
        implementation: one of `NAMES`, or None.
        offered: the op's forms.
        reasons: for each form that can't serve this call (a shape, a dtype), why.

    Returns:
        A key of `offered`, or None where `implementation` is None.

    Raises:
        ValueError: for a name that is no implementation.
        NotImplementedError: if the named one can't run, with every reason.
    """
    if implementation is None:
        return None
    if implementation not in NAMES:
        raise ValueError(
            f"implementation={implementation!r} is not known (allowed: None, {', '.join(map(repr, NAMES))})"
        )
    refused = []
    for form in _FORMS:
        if form.split("_")[0] != implementation:
            continue
        if form not in offered:
            if form == implementation:
                refused.append(f"this op has no {implementation!r} form")
            continue
        found = [reason for reason in (_absent(form), (reasons or {}).get(form)) if reason]
        if not found:
            return form
        refused.append(f"{form}: {' and '.join(found)}")
    if not refused:
        refused.append(f"this op has no {implementation!r} form")
    raise NotImplementedError(f"implementation={implementation!r} cannot run: {'; '.join(refused)}")


def choose(
    implementation: str | None,
    offered: Mapping[str, Callable[..., Any]],
    reasons: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """The function of arrays that computes a call.

    Args:
        implementation: `"xla"`, `"cpu"`, `"pallas"` or `"triton"`; None takes the best form of every platform.
        offered: the op's forms by key (see above), all of one signature of positional arrays; `"xla"` is there.
        reasons: for each form that can't serve this call (a shape, a dtype), why. Without a name such a form is
            passed over.

    Returns:
        A function of the arrays.

    Raises:
        ValueError: for a name that is no implementation.
        NotImplementedError: if the named one can't run here or not on these shapes, with every reason.

    Example:
        >>> forms = {"xla": lambda x: x + 1, "pallas_gpu": lambda x: x + 1}
        >>> int(choose(None, forms)(1))
        2
        >>> choose("pallas", forms)
        Traceback (most recent call last):
        NotImplementedError: implementation='pallas' cannot run: pallas_gpu: no NVIDIA GPU among ...
    """
    named = form_of(implementation, offered, reasons)
    if named is not None:
        return offered[named]
    branches = {}
    for platform in platforms():
        for form in _PREFERRED.get(platform, ()):
            if form in offered and form not in (reasons or {}) and _absent(form) is None:
                branches[platform] = offered[form]
                break
    if not branches:
        return offered["xla"]
    return lambda *arrays: lax.platform_dependent(*arrays, default=offered["xla"], **branches)


def available(op: str) -> dict[str, str | None]:
    """What runs in this process: for every implementation of an op None, or the reason why it can't.

    Args:
        op: name of a folder of this package; its `FORMS` maps every form to None, or to a function that tells why
            this machine can't run it (None if it can).

    Returns:
        Reasons by implementation, in the order of `NAMES`. A shape may rule out more.

    Example:
        >>> available("binary_matmul")["xla"] is None
        True
    """
    forms: Mapping[str, Callable[[], str | None] | None] = importlib.import_module(
        f"pallas_kernels.{op}"
    ).FORMS
    found: dict[str, str | None] = {}
    for name in NAMES:
        mine = [form for form in _FORMS if form in forms and form.split("_")[0] == name]
        if mine:
            own = [forms[form] for form in mine]
            reasons = [_absent(form) or (why() if why else None) for form, why in zip(mine, own)]
            texts = [
                f"{form}: {reason}" if len(mine) > 1 else str(reason) for form, reason in zip(mine, reasons)
            ]
            found[name] = None if None in reasons else "; ".join(texts)
    return found


def describe(op: str) -> list[str]:
    """`available` as lines for `effml doctor`.

    Example:
        >>> describe("binary_matmul")[0]
        'xla      yes'
    """
    reasons = available(op)
    return [f"{name:<8} {'yes' if why is None else f'no: {why}'}" for name, why in reasons.items()]
