#!/usr/bin/env bash
# Builds the site, build/docs/html/index.html: the contracts of the public headers and the pages of docs/, by Doxygen. Installs what is
# missing (Debian, Ubuntu). A warning is an error.
#
#   docs/build.sh [--out FOLDER]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
source tests/packages.sh

need python3 "${documentation_packages[@]}" || exit 1
exec python3 docs/tools/docs_site.py "$@"
