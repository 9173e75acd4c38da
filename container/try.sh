#!/bin/sh
# Builds the image of container/Dockerfile where neither Docker nor the engine's official image is to be had, and looks
# at what comes out: sh container/try.sh WHEELS ENGINE VERSION
#
# WHEELS: as of install.sh. ENGINE and VERSION: such as vllm 0.26.0, sglang 0.5.17.
#
# The official image's place is taken by Debian 12 with Python 3.11, torch for CPUs, and the Python sources of the engine.
# What is tried: that the Dockerfile builds, that nothing of the image below changes but for one package, that
# `llm-comm doctor` finds kernels and engine in it, and that `llm-comm demo` runs. As root on Debian, with buildah,
# debootstrap and a pip of Python 3.11.
set -eu

[ $# -eq 3 ] || { echo "usage: sh container/try.sh WHEELS ENGINE VERSION" >&2; exit 2; }
wheels=$(cd "$1" && pwd) engine=$2 version=$3
repository=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }

echo "== An image in the place of the official one"
debootstrap --variant=minbase --include=python3,python3-pip,libgomp1 bookworm "$work/debian" >"$work/log" ||
    { tail -5 "$work/log"; exit 1; }
site=$work/debian/usr/local/lib/python3.11/dist-packages
python3.11 -m pip install --quiet --target "$site" torch==2.13.0 numpy PyYAML
python3.11 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 --dest "$work" "$engine==$version"
python3.11 - "$work"/"$engine"-*.whl "$site" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if name.endswith(".py") or ".dist-info/" in name:
            wheel.extract(name, sys.argv[2])
PYTHON
container=$(buildah from scratch)
buildah copy --quiet "$container" "$work/debian" / >/dev/null
buildah config --entrypoint '["python3", "-m", "the.engine"]' --workingdir /workspace --env ENGINE="$engine" "$container"
buildah commit --quiet --rm "$container" localhost/official >/dev/null
rm -rf "$work/debian"

echo "== The image of the Dockerfile"
mkdir "$work/context"
cp -r "$repository/container" "$work/context"
cp -r "$wheels" "$work/context/wheelhouse"
argument=$(echo "$engine" | tr '[:lower:]' '[:upper:]')
buildah build --quiet --build-arg "$argument=localhost/official" --target "$engine" \
    --file "$work/context/container/Dockerfile" --tag localhost/with-llm-comm "$work/context" >"$work/log" 2>&1 ||
    { cat "$work/log"; exit 1; }

echo "== What it is made of"
settings() { buildah inspect --type image --format '{{json .OCIv1.Config}}' "localhost/$1"; }
[ "$(settings official)" = "$(settings with-llm-comm)" ] ||
    { echo "entry point, user, environment or directory differ"; settings official; settings with-llm-comm; exit 1; }
packages() {
    container=$(buildah from "localhost/$1")
    buildah run "$container" -- python3 -m pip list --format=freeze --disable-pip-version-check
    buildah rm "$container" >/dev/null
}
packages official >"$work/before"
packages with-llm-comm >"$work/after"
added=$(diff "$work/before" "$work/after" || true)
echo "$added"
echo "$added" | grep -q '^> llm.comm==' && [ "$(echo "$added" | grep -c '^[<>]')" = 1 ] ||
    { echo "other packages than llm_comm have changed"; exit 1; }

echo "== llm-comm doctor, llm-comm demo"
container=$(buildah from localhost/with-llm-comm)
# It exits with 1: there is no GPU.
buildah run "$container" -- llm-comm doctor >"$work/doctor" 2>&1 || true
cat "$work/doctor"
grep -q 'cuda_kernels: machine code' "$work/doctor"
grep -qi "$engine: $version" "$work/doctor"
buildah run "$container" -- llm-comm demo
echo "== built, and runs"
