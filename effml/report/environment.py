"""What a measurement ran on: package versions and the machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

__all__ = ["machine", "versions"]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Versions of Python, effml and the packages whose numerics a result depends on.

    Args:
        packages: distribution names; those not installed are left out.

    Returns:
        Name to version; read from package metadata, so nothing is imported.

    Example:
        >>> sorted(versions(("numpy", "no-such-package")))
        ['effml', 'numpy', 'python']
    """
    from effml import __version__

    found = {"effml": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The machine in words: processor, usable cores, memory, and accelerator devices.

    Devices are listed only if jax is already imported, because asking for them would otherwise import jax
    and claim a GPU. Nothing here identifies the owner: no host name, user or address.

    Returns:
        `{"cpu": str, "cores": int, "memory_gib": float, "system": str, "devices": list[str]}`.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'devices', 'memory_gib', 'system']
    """
    return {
        "cpu": _cpu_name(),
        "cores": _usable_cores(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": _devices(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model") and value.strip():
                    return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0.0
    return round(total / 2**30, 1)


def _devices() -> list[str]:
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "devices"):
        return []
    try:
        return [str(device.device_kind) for device in jax.devices()]
    except RuntimeError:
        return []
