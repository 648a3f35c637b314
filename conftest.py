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
