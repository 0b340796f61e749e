#!/usr/bin/env bash
# Builds the wheel into dist/: `tools/wheel.sh [VENV]`.
#
# The wheel carries the `forebay` binary as one of its scripts, so that `pip install` gives the command itself and
# no wrapper, beside the package and its native module. It serves every CPython from 3.11 on; its platform tag says
# which glibc it needs. VENV (default .venv) is made if it does not exist and gets maturin if it has none.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=${1:-.venv}
target=${CARGO_TARGET_DIR:-target}
# Where maturin looks for files that a wheel installs beside the package; named after the native module.
data=forebay._native.data

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
[ -x "$venv/bin/maturin" ] || "$venv/bin/python" -m pip --disable-pip-version-check --quiet install 'maturin>=1.16,<2'

cargo build --release --locked --package forebay-cli
trap 'rm -rf "$data"' EXIT
install -d "$data/scripts" dist
# Without symbols, which are a sixth of the binary. Addresses in a backtrace are those of `target/release/forebay`,
# which has them.
strip -o "$data/scripts/forebay" "$target/release/forebay"

rm -f dist/forebay-*.whl
"$venv/bin/maturin" build --release --strip --compression-level 9 --out dist --interpreter "$venv/bin/python"
ls dist/forebay-*.whl
