#!/bin/sh
# Installs llm_comm beside an engine, without a network: sh install.sh WHEELS ENGINE
#
# WHEELS: a directory with wheels of one version of llm_comm. The one for this Python is taken.
# ENGINE: the package of the engine, vllm or sglang, which must be there. With it comes all that llm_comm needs.
set -eu

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

[ $# -eq 2 ] || fail "expected a directory of wheels and the name of an engine, got $# arguments"
wheels=$1
engine=$2
python=$(command -v python3 || command -v python) || fail "there is no python3 on the PATH"
"$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$engine') is None)" ||
    fail "$python has no package $engine: is it the Python of the engine?"

# Images without pip have uv. Neither may touch what the engine needs, nor ask a package index.
if "$python" -m pip --version >/dev/null 2>&1; then
    set -- "$python" -m pip install --break-system-packages --root-user-action=ignore
elif command -v uv >/dev/null 2>&1; then
    set -- uv pip install --python "$python" --break-system-packages
else
    fail "neither pip nor uv is there for $python"
fi
"$@" --no-index --no-deps --find-links "$wheels" llm_comm ||
    fail "no wheel in $wheels is for $("$python" --version), or there is none: make wheels, or take those of a release"

# From a directory where no checkout can be mistaken for the package.
cd /
"$python" -c "import llm_comm, sys; sys.exit(not llm_comm.cuda_compiled())" ||
    fail "the wheel of llm_comm cannot be imported, or has no CUDA kernels: make wheels where nvcc is found"
"$python" -c "import llm_comm; print('llm_comm', llm_comm.__version__, 'is installed beside $engine')"
