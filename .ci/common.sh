# Functions of `.ci/run` and `.ci/nightly`, which source this file: versions of Python, new virtual environments, stages.
# Sets $repository, $work (a temporary folder), $oldest and $newest (folders of a python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore TF_CPP_MIN_LOG_LEVEL=3
export PIP_COMPILE=0  # what is imported is compiled then, the rest never
export PYTEST_ADDOPTS=--durations=5  # each stage prints its slowest tests
unset KERAS_BACKEND

# Prints the folder of a Python of one of the given versions, the first that there is, else of the default Python.
find_python() {
  local version found
  for version in "$@"; do
    if found=$("python$version" -c "import sys; print(sys.executable)" 2>/dev/null); then
      mkdir -p "$work/python$version" && ln -sf "$found" "$work/python$version/python3"
      echo "$work/python$version"
      return
    fi
    found=$(pyenv versions --bare 2>/dev/null | grep -E "^${version//./\\.}\.[0-9]+$" | tail -n 1 || true)
    if [ -n "$found" ]; then
      echo "$(pyenv prefix "$found")/bin"
      return
    fi
  done
  echo "no Python $* here: using the default Python in its place" >&2
  dirname "$(command -v python3)"
}

oldest=$(find_python 3.11)
newest=$(find_python 3.13 3.12)

stage() {
  echo "== $(date +%H:%M:%S) $*"
}

# Builds the sdist, and the wheel from that, as a release is built. Sets $wheel. A package index would accept both.
build_distributions() {
  "$newest/python3" -m venv "$work/build" &&
    "$work/build/bin/pip" install -q build twine &&
    "$work/build/bin/python" -m build --outdir "$work/dist" "$repository" >"$work/build.log" ||
    { cat "$work/build.log"; return 1; }
  "$work/build/bin/twine" check --strict "$work"/dist/* &&
    wheel=$(ls "$work"/dist/keras_dist-*.whl)
}

# Creates the virtual environment $work/NAME with a Python, or takes the one there is, and installs the wheel with extras.
install() {
  local name=$1 python=$2 extras=${3:-}
  "$python/python3" -m venv "$work/$name" &&
    "$work/$name/bin/pip" install -q "$wheel${extras:+[$extras]}"
}

print_versions() {
  "$1/python" -c 'import platform, importlib.metadata as m
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in ("jax", "keras", "numpy")))'
}

# Installs the part of the extra "cuda12" that compiles, of the version of JAX that is there: not the gigabytes that run.
install_gpu_compiler() {
  local version
  version=$("$1/python" -c "import importlib.metadata as m; print(m.version('jax'))") || return 1
  "$1/pip" install -q --no-deps "jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version"
}

# Copies what tests need, but not the package: away from the source tree, they test what is installed.
copy_tests() {
  mkdir "$1"
  cp -r .ci .github ./*.md LICENSE conftest.py pyproject.toml benchmarks docs guides tests "$1"
}

# Builds the site in the copy of the tests, with options of Sphinx. It executes the guides, unless one of them says not to:
# then KERAS_DIST_EXECUTED_GUIDES=COPY/docs lets tests read what they printed.
build_documentation() {
  local environment=$1 copy=$2 options=${*:3}
  PATH="$environment/bin:$PATH" JAX_DISABLE_MOST_OPTIMIZATIONS=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
    make -C "$copy/docs" clean html SPHINXOPTS="$options" >"$copy/docs.log" 2>&1 ||
    { tail -n 60 "$copy/docs.log"; exit 1; }
  tail -n 3 "$copy/docs.log"
}
