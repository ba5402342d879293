# Sourced by the scripts: `need PACKAGE...` installs those of the Debian or Ubuntu packages that are missing.

need() {
  local missing=() package
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "This is no Debian or Ubuntu: what these packages hold is taken as installed: $*"
    return 0
  fi
  for package in "$@"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0

  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "These packages are missing, and installing them takes root or sudo: ${missing[*]}" >&2
      echo "Have an administrator run: apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  echo "Installing: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq || echo "apt-get update failed; trying with the package lists at hand" >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    </dev/null >/dev/null || { echo "apt-get could not install: ${missing[*]}" >&2; return 1; }
}

# Sets clang_version to the newest clang that is installed, or else that can be had; 16 or newer, as older ones lack
# parts of C++20.
find_clang() {
  local found candidate
  clang_version=
  installed() { command -v "clang++-$1" >/dev/null; }
  available() { apt-cache show "clang-$1" >/dev/null 2>&1; }
  for found in installed available; do
    for candidate in 21 20 19 18 17 16; do
      if [ -z "$clang_version" ] && "$found" "$candidate"; then clang_version=$candidate; fi
    done
  done
  [ -n "$clang_version" ] && return 0
  echo "No clang 16 or newer is installed, and apt-get knows none (run apt-get update?)." >&2
  return 1
}

build_packages=(g++ cmake ninja-build ccache)
example_packages=(libcli11-dev nlohmann-json3-dev libsentencepiece-dev libpcre2-dev libeigen3-dev)
test_packages=(git python3 catch2)
benchmark_packages=(libbenchmark-dev)
documentation_packages=(doxygen)
