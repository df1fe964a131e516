#!/usr/bin/env bash
# Collects in a folder what run.sh needs on a machine without a network: llama.cpp's source, trimmed; wheels; a model.
#
#     tests/gpu/pack.sh FOLDER LLAMA_CPP_PYTHON_SOURCE [MODEL]
#
# LLAMA_CPP_PYTHON_SOURCE is the unpacked source package of llama-cpp-python. MODEL is cut into pieces of 45 MB, since
# what travels at a time may be limited: run.sh puts together those that have arrived.
set -euo pipefail
folder=$1 source=$2 model=${3:-}
mkdir -p "$folder/wheels"
folder=$(cd "$folder" && pwd)
tar -C "$source" -cJf "$folder/llama.tar.xz" \
    --exclude='*/models/*.gguf' --exclude=vendor/llama.cpp/models --exclude=vendor/llama.cpp/docs \
    --exclude=vendor/llama.cpp/media --exclude='*/ggml-sycl' --exclude='*/ggml-vulkan' --exclude='*/ggml-opencl' \
    --exclude='*/ggml-hexagon' --exclude='*/ggml-metal' --exclude='*/ggml-cann' --exclude='*/ggml-webgpu' \
    --exclude='*/tools/ui/src' --exclude='*/tools/ui/node_modules' --exclude='*/.git' vendor/llama.cpp llama_cpp
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$folder/wheels" gguf platformdirs prompt_toolkit wcwidth diskcache nvidia-ml-py \
    filelock starlette uvicorn h11 anyio msgspec prometheus-client llguidance
if [ -n "$model" ]; then
    (cd "$folder" && split -b 45M -d -a 2 "$(realpath "$model")" "$(basename "$model").part")
fi
du -sh "$folder"
