"""Native code for the CPU: C++ sources that the user's own compiler builds once, for the machine at hand.

A wheel holds the sources alone. The first use compiles them with `c++`, `g++` or `clang++` (or `$CXX`) against the FFI
headers that come with jaxlib, in a few seconds, and keeps the library in `~/.cache/effml/native` (or
`$EFFML_CACHE/native`) under a hash of sources, compiler, flags, jaxlib and processor. Where that can't be done there is
a reason in words, and whoever asked goes on without. `EFFML_NATIVE=0` switches native code off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import jax

__all__ = ["build", "cache_folder", "why_not"]

# Tried in this order: some compilers for ARM know the processor by -mcpu alone.
_TUNING = (("-march=native",), ("-mcpu=native",), ())
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-w")
_LOCK = threading.Lock()


def cache_folder() -> Path:
    """Where built libraries are kept.

    Example:
        >>> cache_folder().name
        'native'
    """
    return Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache" / "effml") / "native"


def why_not(folder: Path, targets: Sequence[str]) -> str | None:
    """Builds and registers the native code of an op on first use.

    Args:
        folder: holds `cpu.cc`, and perhaps headers.
        targets: the handler symbols in it, which become targets of `jax.ffi.ffi_call` by the same names.

    Returns:
        None if the targets are there; else why not, in one line.

    Example:
        >>> why_not(Path("no such folder"), ["nothing"])
        'no source ...'
    """
    if os.environ.get("EFFML_NATIVE") == "0":
        return "native code is switched off (EFFML_NATIVE=0)"
    with _LOCK:
        return _register(folder, tuple(targets))


@functools.cache
def _register(folder: Path, targets: tuple[str, ...]) -> str | None:
    try:
        library = ctypes.CDLL(str(build(folder)))
        for target in targets:
            capsule = jax.ffi.pycapsule(getattr(library, target))
            jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    except (OSError, RuntimeError, AttributeError) as error:
        return " ".join(str(error).split())[:400]
    return None


def build(folder: Path) -> Path:
    """The shared library made of `folder/cpu.cc`, compiled unless it is in the cache.

    Two processes may build at once: each writes a file of its own and renames it, and both end with a whole one.

    Args:
        folder: holds `cpu.cc`, and perhaps headers.

    Returns:
        Path of the library.

    Raises:
        RuntimeError: if there is no source, no compiler, or the compiler fails.
    """
    source = folder / "cpu.cc"
    if not source.is_file():
        raise RuntimeError(f"no source {source}")
    parts = [path.read_bytes() for path in sorted([*folder.glob("*.cc"), *folder.glob("*.h")])]
    parts += [" ".join(_FLAGS).encode(), importlib.metadata.version("jaxlib").encode(), _processor()]
    compiler = _compiler()
    name = f"{folder.name}-{hashlib.sha256(b'|'.join([*parts, compiler.encode()])).hexdigest()[:20]}.so"
    cached = cache_folder() / name
    if cached.is_file():
        return cached
    if not compiler:
        raise RuntimeError("no C++ compiler (looked for $CXX, c++, g++ and clang++)")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cached.parent, prefix=f".{name}.")
    except OSError:  # a cache that can't be written: build for this process alone
        cached = Path(tempfile.mkdtemp(prefix="effml-native-")) / name
        handle, temporary = tempfile.mkstemp(dir=cached.parent)
    os.close(handle)
    try:
        _compile(compiler, source, Path(temporary))
        os.chmod(temporary, 0o755)
        os.replace(temporary, cached)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return cached


def _compile(compiler: str, source: Path, target: Path) -> None:
    said = ""
    for tuning in _TUNING:
        command = [compiler, *_FLAGS, *tuning, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{compiler} does not run: {error}") from None
        if done.returncode == 0:
            return
        said = said or next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
    raise RuntimeError(f"{compiler} failed: {said}")


def _compiler() -> str:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), "")


def _processor() -> bytes:
    """What tells processors apart that need different code: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [
            line for line in lines if line.lower().startswith(("model name", "flags", "features", "cpu part"))
        ]
        about = "|".join(sorted(set(kept)))
    except OSError:
        about = platform.processor()
    return f"{platform.system()} {platform.machine()} {about}".encode()
