#!/usr/bin/env bash
# Gets llama.cpp out of the PyPI archive of llama-cpp-python 0.3.36 (MIT), and builds libllama for the CPU. Nothing of it lies in this
# repository. The last two lines are what CMake wants: LLAMA_CPP=... and LLAMA_CPP_BUILD=...
#
#   get_llama_cpp.sh [FOLDER]                  build/llama_cpp_source unless given
#   LLAMA_CPP=CHECKOUT get_llama_cpp.sh        builds your own checkout; its interfaces must be those of 2026-11
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

folder=$(realpath -m "${1:-build/llama_cpp_source}")
version=0.3.36
sum=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
mkdir -p "$folder"
source=${LLAMA_CPP:-$folder/llama_cpp_python-$version/vendor/llama.cpp}
if [ ! -f "$source/include/llama.h" ]; then
  [ -z "${LLAMA_CPP:-}" ] || { echo "LLAMA_CPP is $LLAMA_CPP; expected a checkout of llama.cpp, with include/llama.h" >&2; exit 1; }
  archive=$folder/llama_cpp_python-$version.tar.gz
  if [ ! -f "$archive" ]; then
    python3 -m venv "$folder/venv" || { echo "python3 -m venv does not work; Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; }
    # pip may look at how the archive would be built, and fail at that when it has the archive.
    "$folder/venv/bin/pip" download -q --no-deps --no-binary llama_cpp_python --dest "$folder" "llama_cpp_python==$version" >&2 || true
    rm -rf "$folder/venv"
    [ -f "$archive" ] || { echo "pip could not get llama_cpp_python $version; put $archive there" >&2; exit 1; }
  fi
  [ "$(sha256sum "$archive" | cut -d " " -f 1)" = "$sum" ] || { echo "$archive is another file; expected SHA-256 $sum" >&2; exit 1; }
  tar xzf "$archive" -C "$folder" "llama_cpp_python-$version/vendor/llama.cpp"
fi
built=${LLAMA_CPP_BUILD:-$folder/build}
if [ ! -e "$built/bin/libllama.so" ]; then
  cmake -G Ninja -S "$source" -B "$built" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF >&2
  cmake --build "$built" --target llama --parallel "$(nproc)" >&2
fi
echo "LLAMA_CPP=$source"
echo "LLAMA_CPP_BUILD=$built"
