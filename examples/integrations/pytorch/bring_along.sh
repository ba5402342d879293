#!/usr/bin/env bash
# Wheels for a GPU machine without a network: about 25 MB for Python 3.12 on x86-64, beside the PyTorch that is there.
#
#   bring_along.sh FOLDER               with a network: downloads them
#   bring_along.sh --unpack FOLDER TO   on the GPU machine: unpacks them for PYTHONPATH=TO
#
# kvpress imports datasets, which imports pandas and pyarrow (60 MB): these two, NumPy and ninja must be on the machine.
# Without them kvpress cannot be imported; all else works.
set -euo pipefail
if [ "${1:?a folder}" = --unpack ]; then
  mkdir -p "${3:?where to}"
  for wheel in "${2:?a folder}"/*.whl; do python3 -m zipfile -e "$wheel" "$3"; done
  exit
fi
wheels=(
  'transformers==4.57.*' 'tokenizers==0.22.*' 'huggingface_hub==0.36.*' safetensors regex packaging pyyaml tqdm requests
  urllib3 idna certifi charset-normalizer filelock fsspec sentencepiece protobuf pytest pytest-xdist execnet pytest-timeout iniconfig pluggy pygments
  kvpress==0.5.5 'datasets==4.4.*' dill multiprocess xxhash 'cachetools<6' fire termcolor httpx httpcore anyio h11
)
mkdir -p "$1"
# Every need is named above: pip would bring PyTorch too.
pip download --quiet --no-deps --python-version 312 --only-binary=:all: --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$1" "${wheels[@]}"
du -sh "$1"
