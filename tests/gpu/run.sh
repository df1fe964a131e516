#!/usr/bin/env bash
# Builds llama.cpp with CUDA and measures edgert's llama backend on the GPUs of this machine; needs no network.
#
#     tests/gpu/run.sh FOLDER [MEASURE_OPTIONS...]      FOLDER is what pack.sh made, or a part of it
#
# The build stays in /tmp/edgert-gpu, so that a second call on the same machine goes on with the rest of a model; a
# build that is under way is waited for. KEEP=1 puts it into $OUT in pieces of 15 MB, which in FOLDER replace the build
# on another machine of the same kind. SKIP_MEASURE=1 builds only.
# Needs nvcc, cmake, ninja and Python 3.11 or newer with numpy, numba, psutil, click, jinja2, tokenizers, rich.
# Results: $OUT/gpu.json and $OUT/gpu.md (OUT defaults to the working directory).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(cd "$1" && pwd) work=/tmp/edgert-gpu
shift
out=${OUT:-$PWD}
mkdir -p "$work/models" "$work/site" "$work/parts"
cp -n "$folder"/*.part?? "$work/parts/" 2>/dev/null || true
cp -n "$folder"/*.gguf "$work/models/" 2>/dev/null || true
for first in "$work"/parts/*.part00; do
    [ -e "$first" ] || continue
    name=$(basename "$first" .part00)
    place=$work/models/$name
    [ "$name" != built.tar.xz ] || place=$work/$name
    cat "$work/parts/$name".part?? > "$place.whole" && mv "$place.whole" "$place"
done
export PYTHONPATH="$work/site:$root"
exec 9> "$work/lock" && flock 9
if [ ! -e "$work/built" ] && [ ! -e "$work/built.tar.xz" ] && [ ! -e "$folder/llama.tar.xz" ]; then
    ls -l "$work/parts" "$work/models"
    exit
fi
if [ ! -e "$work/built" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$work/site" "$folder"/wheels/*.whl
    if [ -e "$work/built.tar.xz" ]; then
        tar -C "$work" -xJf "$work/built.tar.xz"
    else
        mkdir -p "$work/source" && tar -C "$work/source" -xJf "$folder/llama.tar.xz"
        mkdir -p "$work/source/vendor/llama.cpp/tools/ui" "$work/source/vendor/llama.cpp/tools/mtmd/models"
        arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
        start=$(date +%s)
        cmake -S "$work/source/vendor/llama.cpp" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON \
            -DCMAKE_CUDA_ARCHITECTURES="$arch" -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
            -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DGGML_RPC=ON -DGGML_CUDA_NCCL=OFF > "$work/cmake.log" 2>&1 ||
            { tail -30 "$work/cmake.log"; exit 1; }
        cmake --build "$work/build" --target llama-bench ggml-rpc-server mtmd > "$work/build.log" 2>&1 ||
            cmake --build "$work/build" --target llama-bench ggml-rpc-server >> "$work/build.log" 2>&1 ||
            { tail -40 "$work/build.log"; exit 1; }
        rm -rf "$work/site/llama_cpp" && cp -r "$work/source/llama_cpp" "$work/site/llama_cpp"
        mkdir -p "$work/site/llama_cpp/lib" "$work/bin"
        cp -a "$work"/build/bin/*.so* "$work/site/llama_cpp/lib/"
        cp "$work"/build/bin/{llama-bench,ggml-rpc-server} "$work/bin/"
        find "$work/site/llama_cpp/lib" "$work/bin" -type f -exec strip --strip-unneeded {} + || true
        echo "built for sm_$arch in $(($(date +%s) - start)) s"
    fi
    touch "$work/built"
fi
if [ -n "${KEEP:-}" ]; then
    tar -C "$work" -c site/llama_cpp bin | xz -T0 -6 | split -b 15M -d -a 2 - "$out/built.tar.xz.part"
fi
flock -u 9
export LD_LIBRARY_PATH="$work/site/llama_cpp/lib:${LD_LIBRARY_PATH:-}" EDGERT_CACHE="$work/cache"
[ -n "${SKIP_MEASURE:-}" ] || python3 "$here/measure.py" --models "$work/models" \
    --llama-bench "$work/bin/llama-bench" --out "$out" "$@"
