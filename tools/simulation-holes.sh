#!/usr/bin/env bash
# Puts holes that were closed back into a copy of the daemon's sources, one after another, and says after how many seeds
# the simulation finds each. Fails if one is not found in time, or if its patch does not apply any more.
# `--check` only asks whether the patches apply, in less than a second.
set -euo pipefail
cd "$(dirname "$0")/.."
patches=$PWD/crates/daemon/src/tests/simulation/holes
if [ "${1-}" = --check ]; then
    git apply --check "$patches"/*.patch
    exit
fi
seconds=${1:-300}
copy=target/holes
rm -rf "$copy"
mkdir -p "$copy"
git ls-files -z | xargs -0 cp --parents -t "$copy"
# A target directory of its own: cargo takes the copy for the checkout, and would test the checkout with a hole in it.
export CARGO_TARGET_DIR="$PWD/target/holes-target" SIMULATION_SECONDS="$seconds" RUST_BACKTRACE=0
cd "$copy"
status=0
for hole in "$patches"/*.patch; do
    patch --quiet --strip 1 < "$hole"
    name=$(basename "$hole" .patch)
    said=$(cargo test --locked --quiet --package forebay-daemon --lib simulation::no_schedule -- --nocapture 2>&1) && is_found= || is_found=1
    # A copy that does not compile fails too, and has found nothing.
    if [ "$is_found" ] && line=$(grep --max-count 1 'fails after' <<< "$said"); then
        echo "$name: $line"
    else
        echo "$name: not found in $seconds s"
        tail --lines 20 <<< "$said" >&2
        status=1
    fi
    patch --quiet --strip 1 --reverse < "$hole"
done
exit $status
