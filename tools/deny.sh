#!/usr/bin/env bash
# Checks licences, bans and sources of all crates as deny.toml says: `tools/deny.sh FOLDER`, which gets cargo-deny.
set -euo pipefail

folder=${1:?usage: tools/deny.sh FOLDER}
cargo install --quiet --locked --root "$folder" --version 0.20.2 cargo-deny
"$folder/bin/cargo-deny" --all-features check licenses bans sources
