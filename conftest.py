"""Settings every test process and its children share; set before jax is loaded."""

import os
from pathlib import Path

# Small LAPACK calls crawl when OpenBLAS spreads them over busy cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled programs outlive the run: without the two thresholds hardly any test program would be kept.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Kernels in Triton's language need triton, an extra; they hold no doctests.
collect_ignore_glob = ["pallas_kernels/*/triton_kernel.py"]


def pytest_configure(config):
    """Property tests are not judged by their seconds: the first example of many compiles."""
    import hypothesis

    hypothesis.settings.register_profile("effml", deadline=None)
    hypothesis.settings.load_profile("effml")


def pytest_runtest_teardown(item, nextitem):
    """Lets go of a folder's compiled programs, which would add up to gigabytes over the whole run."""
    if nextitem is not None and nextitem.path.parent != item.path.parent:
        import gc

        import jax

        jax.clear_caches()
        gc.collect()
