#!/usr/bin/env bash
# Builds the wheel into dist/: `tools/wheel.sh [VENV]`.
#
# The wheel carries the `forebay` binary as one of its scripts, so that `pip install` gives the command itself and
# no wrapper, beside the package and its native module. It serves every CPython from 3.11 on; the platform tag says
# which glibc it needs, which is that of this machine or less. VENV (default .venv) gets maturin if it has none;
# it is made if it does not exist.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv}
cd "$root"

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
[ -x "$venv/bin/maturin" ] || "$venv/bin/python" -m pip --disable-pip-version-check --quiet install 'maturin>=1.16,<2'

target=${CARGO_TARGET_DIR:-target}
cargo build --release --locked --package forebay-cli

# `data` in pyproject.toml; what lies in its `scripts` is installed beside the interpreter. Symbols are more than
# half of the binary, and a backtrace names functions without them.
install -d target/wheel/scripts dist
strip --strip-debug -o target/wheel/scripts/forebay "$target/release/forebay"

rm -f dist/forebay-*.whl
"$venv/bin/maturin" build --release --strip --out dist --interpreter "$venv/bin/python"
ls dist/forebay-*.whl
