#!/usr/bin/env bash
# Builds into dist/ what a release carries: `tools/dist.sh [VENV]`.
#
#   forebay-VERSION-TARGET   the command, with its symbols: static where Rust's musl target is installed
#                            (`rustup target add x86_64-unknown-linux-musl`, and `musl-gcc` for the C in `ring`), else
#                            linked with this machine's glibc
#   forebay-VERSION-*.whl    the wheel, stripped
#   SHA256SUMS               `sha256sum --check` reads it
set -euo pipefail

cd "$(dirname "$0")/.."
venv=${1:-.venv}
target_dir=${CARGO_TARGET_DIR:-target}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
host=$(rustc -vV | sed -n 's/^host: //p')
musl=${host/-gnu/-musl}

rm -rf dist
tools/wheel.sh "$venv"
if [ -d "$(rustc --print sysroot)/lib/rustlib/$musl/lib" ] && command -v musl-gcc >/dev/null; then
  cargo build --release --locked --package forebay-cli --target "$musl"
  install -m 755 "$target_dir/$musl/release/forebay" "dist/forebay-$version-$musl"
else
  echo "note: no static binary, since Rust's $musl target or musl-gcc is not installed" >&2
  install -m 755 "$target_dir/release/forebay" "dist/forebay-$version-$host"
fi
(cd dist && sha256sum -- * > SHA256SUMS && cat SHA256SUMS)
