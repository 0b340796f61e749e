#!/usr/bin/env bash
# Builds into dist/ what a release carries: `tools/dist.sh [VENV]`.
#
#   forebay-VERSION-TARGET   the command, with its symbols; it needs no library of the host, not even a C library
#   forebay-VERSION-*.whl    the wheel, stripped
#   SHA256SUMS               `sha256sum --check` reads it
set -euo pipefail

cd "$(dirname "$0")/.."
venv=${1:-.venv}
target_dir=${CARGO_TARGET_DIR:-target}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
target=$(rustc -vV | sed -n 's/^host: //p')

rm -rf dist
tools/wheel.sh "$venv"

# With the C library of the machine that builds. Its static form reads /etc/hosts and asks DNS like the shared one.
RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static" cargo build --release --locked --package forebay-cli --target "$target"
binary=dist/forebay-$version-$target
install -m 755 "$target_dir/$target/release/forebay" "$binary"
if readelf --program-headers "$binary" | grep --quiet INTERP; then
  echo "error: $binary asks for a dynamic linker" >&2
  exit 1
fi
"$binary" --version
(cd dist && sha256sum -- * > SHA256SUMS && cat SHA256SUMS)
