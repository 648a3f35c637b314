"""Native code for the CPU: C++ sources that the user's own compiler builds once, for the machine at hand.

A wheel holds the sources alone: `cpu.cc` of every op that has one, and in `native/` what they share, such as the
threads. The first use compiles them into one library with `c++`, `g++` or `clang++` (or `$CXX`) against the FFI headers
that come with jaxlib, in a few seconds, and keeps it in `~/.cache/effml/native` (or `$EFFML_CACHE/native`) under a hash
of sources, compiler, flags, jaxlib and processor. Where that can't be done there is a reason in words, and whoever
asked goes on without. `EFFML_NATIVE=0` switches native code off.
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
from pathlib import Path

import jax

__all__ = ["BuildError", "build", "cache_folder", "describe", "number", "sources", "why_not"]

# Tried in this order: some compilers for ARM know the processor by -mcpu alone.
_TUNING = (("-march=native",), ("-mcpu=native",), ())
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-w")
_SHARED = "native"
_LOCK = threading.Lock()
_SHOWN = 20  # lines of a compiler's complaint


class BuildError(RuntimeError):
    """Why there is no library, in one line; `output` is all that the compiler said."""

    def __init__(self, reason: str, output: str = ""):
        super().__init__(reason)
        self.output = output


def cache_folder() -> Path:
    """Where built libraries are kept.

    Example:
        >>> cache_folder().name
        'native'
    """
    return Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache" / "effml") / _SHARED


def sources() -> list[Path]:
    """The C++ files that make the library.

    Example:
        >>> "matvec" in {path.parent.name for path in sources()}
        True
    """
    return sorted(Path(__file__).parent.glob("*/cpu.cc"))


def why_not(*targets: str) -> str | None:
    """Builds the library on first use and registers handlers of it.

    Args:
        targets: handler symbols, which become targets of `jax.ffi.ffi_call` by the same names.

    Returns:
        None if the targets are there; else why not, in one line.

    Example:
        >>> "nothing" in why_not("nothing") or "native code" in why_not("nothing")
        True
    """
    if os.environ.get("EFFML_NATIVE") == "0":
        return "native code is switched off (EFFML_NATIVE=0)"
    with _LOCK:
        return _register(targets)


def describe() -> list[str]:
    """Lines for `effml doctor`: the threads that share a product, or all that the compiler said.

    Example:
        >>> describe()[0][:8]
        'compiler'
    """
    lines = [f"compiler {_compiler() or 'none'}, libraries in {cache_folder()}"]
    reason = why_not()
    if reason is None:
        return [*lines, f"built; {number('effml_threads')} threads share a product"]
    lines.append(f"not built: {reason}")
    if os.environ.get("EFFML_NATIVE") != "0":
        output = getattr(_failure(), "output", "").splitlines()
        lines += [f"  {line}" for line in output[:_SHOWN]]
        lines += [f"  ({len(output) - _SHOWN} more lines)"] if len(output) > _SHOWN else []
    return lines


def number(function: str) -> int:
    """What a function of the library without arguments returns; only after `why_not` found nothing.

    Example:
        >>> why_not() is not None or number("effml_threads") > 0
        True
    """
    return getattr(_library(), function)()


@functools.cache
def _register(targets: tuple[str, ...]) -> str | None:
    error = _failure()
    if error is not None:
        return " ".join(str(error).split())[:400]
    try:
        for target in targets:
            capsule = jax.ffi.pycapsule(getattr(_library(), target))
            jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    except AttributeError as error:
        return " ".join(str(error).split())[:400]
    return None


@functools.cache
def _failure() -> Exception | None:
    try:
        _library()
    except (OSError, RuntimeError) as error:
        return error
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, built if need be and loaded."""
    library = _cached()
    if library.is_file():
        return ctypes.CDLL(str(library))
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=library.parent):
            pass
    except (
        OSError
    ):  # a cache that can't be written: build for this process alone, which needs no file once it is loaded
        with tempfile.TemporaryDirectory(prefix="effml-native-") as folder:
            return ctypes.CDLL(str(build(Path(folder) / library.name)))
    return ctypes.CDLL(str(build(library)))


def _cached() -> Path:
    """Where the library of these sources, compiler, jaxlib and processor lies, or would."""
    package = Path(__file__).parent
    files = sorted([*package.glob("*/cpu.cc"), *package.glob("*/*.h")])
    parts = [path.relative_to(package).as_posix().encode() + path.read_bytes() for path in files]
    parts += [" ".join(_FLAGS).encode(), importlib.metadata.version("jaxlib").encode(), _processor()]
    digest = hashlib.sha256(b"|".join([*parts, _compiler().encode()])).hexdigest()
    return cache_folder() / f"pallas_kernels-{digest[:20]}.so"


def build(library: Path) -> Path:
    """Compiles the sources into a shared library.

    Two processes may build at once: each writes a file of its own and renames it, and both end with a whole one.

    Args:
        library: path of the result, in a folder that can be written.

    Returns:
        That path.

    Raises:
        BuildError: if there is no source, no compiler, or the compiler fails.
    """
    if not sources():
        raise BuildError(f"no source in {Path(__file__).parent}")
    if not _compiler():
        raise BuildError("no C++ compiler (looked for $CXX, c++, g++ and clang++)")
    handle, temporary = tempfile.mkstemp(dir=library.parent, prefix=f".{library.name}.")
    os.close(handle)
    try:
        _compile(_compiler(), Path(temporary))
        os.chmod(temporary, 0o755)
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library


def _compile(compiler: str, target: Path) -> None:
    package = Path(__file__).parent
    names = [path.relative_to(package).as_posix() for path in sources()]
    include = [f"-I{jax.ffi.include_dir()}", f"-I{_SHARED}"]
    said = ""
    for tuning in _TUNING:
        command = [compiler, *_FLAGS, *tuning, *include, *names, "-o", str(target)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, check=False, cwd=package
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler} does not run: {error}") from None
        if done.returncode == 0:
            return
        said = said or done.stderr.strip() or f"exit status {done.returncode}"
    first = next((line for line in said.splitlines() if "error" in line), said)
    raise BuildError(f"{compiler} failed: {first}", said)


def _compiler() -> str:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    found = next((path for name in names if name and (path := shutil.which(name))), "")
    return os.path.abspath(found) if found else ""


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
