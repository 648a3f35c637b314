#!/usr/bin/env bash
# The tests of the kernels on JAX 0.12 with Python 3.12, at all four levels (lowering, sm_90 and TPU code included).
#
#     .ci/kernels_jax_0_12.sh [TEST ...]      # all of tests/kernels without arguments
#
# PYTHON312 names the interpreter (default: python3.12). The environment is made once, in $EFFML_CACHE/jax-0.12.
set -euo pipefail
cd "$(dirname "$0")/.."

cache="${EFFML_CACHE:-$HOME/.cache/effml}/jax-0.12"
python="$cache/venv/bin/python"
export OPENBLAS_NUM_THREADS=1 JAX_PLATFORMS=cpu PIP_DISABLE_PIP_VERSION_CHECK=1
export JAX_COMPILATION_CACHE_DIR="$cache/jax"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

interpreter="${PYTHON312:-}"
if [ -z "$interpreter" ]; then
  # A version manager's shim only answers when told which version.
  versions=$(ls "${PYENV_ROOT:-$HOME/.pyenv}/versions" 2>/dev/null | grep '^3\.12\.' | sort -V | tail -1 || true)
  [ -n "$versions" ] && export PYENV_VERSION="$versions"
  interpreter=python3.12
fi
if ! [ -e "$cache/ready" ]; then
  "$interpreter" -c 'import sys; assert sys.version_info[:2] == (3, 12), sys.version' ||
    { echo "no Python 3.12: set PYTHON312 to one" >&2; exit 2; }
  rm -rf "$cache/venv"
  "$interpreter" -m venv "$cache/venv"
  $python -m pip install -q 'jax[tpu]==0.12.*' 'triton>=3.6' numpy chex hypothesis pytest flatbuffers jaxtyping beartype
  touch "$cache/ready"
fi
$python -c 'import jax, libtpu, triton; print("JAX", jax.__version__, "triton", triton.__version__)'

if [ "$#" -eq 0 ]; then set -- tests/kernels; fi
$python -m pytest -p no:cacheprovider -q "$@"
