#!/usr/bin/env bash
# Measures on a GPU host what copies from and to GPUs rest on, in less than ten minutes, the most needed first:
#
#   bench/gpu.sh [FOLDER]              on a GPU host
#   bench/gpu.sh --rehearse [FOLDER]   the same steps in a small size on the fake driver: its figures mean nothing
#
# Figures go to FOLDER/gpu.jsonl, those of the methods to device.json and device.svg beside it, and times to the first
# token to ttft.json and ttft.svg; FOLDER is $OUT or the repository's root if none is given.
# It needs `target/release/forebay` ($FOREBAY_BIN names another one) and `target/release/examples/gpu`, built here if
# cargo is at hand and else to be brought along:
# `cargo build --release --locked --package forebay-cli` and
# `cargo build --release --locked --package forebay-device --example gpu`. Times to the first token need a Python with
# PyTorch and Forebay's module too, $PYTHON or .venv/bin/python; without one they are left out.
set -euo pipefail
cd "$(dirname "$0")/.."

small=() profile=release gib=10 kills=20 limit=240
if [ "${1:-}" = --rehearse ]; then
  shift
  small=(small) profile=debug gib=0 kills=3 limit=120
fi
out=${1:-${OUT:-.}}
mkdir -p "$out"
result=$out/gpu.jsonl
gpu=target/$profile/examples/gpu forebay=${FOREBAY_BIN:-target/$profile/forebay}

build() {
  [ -n "${FOREBAY_BIN:-}" ] || cargo build --quiet --locked "$@" --package forebay-cli --bin forebay
  cargo build --quiet --locked "$@" --package forebay-device --example gpu
}
if [ "$profile" = debug ]; then
  build
  cargo build --quiet --locked --package forebay-fake-cuda
  fake=$(mktemp -d)
  ln -s "$PWD/target/debug/libfake_cuda.so" "$fake/libcuda.so.1"
  export LD_LIBRARY_PATH=$fake
elif command -v cargo > /dev/null; then
  build --release
fi
# In memory, where a pool lies; containers often have too little there, and a file that is cached serves as well.
free_shm=$(df --output=avail --block-size=1G /dev/shm | tail -1)
folder=/dev/shm
[ "$free_shm" -ge 1 ] || folder=${TMPDIR:-/tmp}
shm=$(mktemp -d "$folder/forebay-gpu-XXXXXX")
trap 'rm -rf "$shm" ${fake:+"$fake"}' EXIT

: > "$result"
failed=()
# Seconds after which nothing more is begun and what runs is ended, counted from here: builds come before.
all=570 begin=$SECONDS
# The seconds that something may take, of so many; at least one, within which nothing is measured.
within() {
  local left=$((all - SECONDS + begin))
  echo $((left < 1 ? 1 : left < $1 ? left : $1))
}
# Runs a row within its seconds; what fails is said, and the next row goes on.
row() {
  local number=$1 name=$2 seconds
  seconds=$(within "$3")
  shift 3
  local begun=$SECONDS
  if ! timeout "$seconds" "$@" "${small[@]}" | sed "s/^{/{\"row\":$number,/" >> "$result"; then
    failed+=("$number $name")
  fi
  echo "row $number, $name: $((SECONDS - begun)) s" >&2
}

row 1 peaks 60 "$gpu" peaks

# 4 KiB pages of a file, as a pool's without huge pages; huge pages of memory; at once; with little memory to lock.
free_gib=$(awk '/MemAvailable/ { print int($2 / 1048576 / 3) }' /proc/meminfo)
[ "$gib" -gt "$free_gib" ] && gib=$free_gib
[ "$gib" -gt $((free_shm / 2)) ] && gib=$((free_shm / 2))
bytes=$((gib << 30))
[ "$gib" -eq 0 ] && bytes=$((64 << 20))
head --bytes "$bytes" /dev/zero > "$shm/pool"
row 2 "register 4 KiB pages" 60 "$gpu" register "4 KiB pages of a file" "$bytes" "$shm/pool"
row 2 "register by two" 60 sh -c '
  "$@" & first=$!
  "$@" || exit
  wait $first' two "$gpu" register "4 KiB pages, two processes at once" "$bytes" "$shm/pool"
row 2 "register with a small limit" 60 prlimit --memlock=65536:65536 \
  "$gpu" register "4 KiB pages, 64 KiB of locked memory allowed" "$bytes" "$shm/pool"
rm "$shm/pool"
row 2 "register huge pages" 60 "$gpu" register "huge pages" "$bytes"

methods=()
[ "$profile" = debug ] && methods=(--size-bytes 4KiB --count 16 --working-set-bytes 1MiB --runs 1 --product-rows 16)
begun=$SECONDS
timeout "$(within "$limit")" "$forebay" bench device --engine cuda "${methods[@]}" --json --plot "$out/device.svg" \
  > "$out/device.json" || failed+=("3 methods")
echo "row 3, methods: $((SECONDS - begun)) s" >&2
row 4 checksums 60 "$gpu" checksums
row 5 schedules "$limit" "$gpu" schedules
row 6 kills 90 "$gpu" kills "$shm/kills" "$kills"

python=${PYTHON:-.venv/bin/python} has_gpu="torch.cuda.is_available()" first=(--lengths 1024,2048,4096,8192,16384)
# The longest prefix has 11 GiB of KV.
[ "$free_shm" -ge 20 ] && first=()
if [ "$profile" = debug ]; then
  # The fake driver is none for PyTorch.
  unset LD_LIBRARY_PATH
  has_gpu=True first=(--device cpu --shape tiny --lengths 64,96 --repeats 1 --requests 4)
fi
missing=
export PYTHONPATH=${PYTHONPATH:-python:tests}
if "$python" -c "import forebay, torch; assert $has_gpu" 2> /dev/null; then
  begun=$SECONDS
  FOREBAY_BIN=$forebay timeout "$(within 180)" "$python" bench/ttft.py "${first[@]}" --json "$out/ttft.json" \
    --plot "$out/ttft.svg" >&2 || failed+=("8 ttft")
  echo "row 8, ttft: $((SECONDS - begun)) s" >&2
else
  missing="time to first token, for want of a Python with PyTorch and Forebay's module; "
fi

cat "$result"
cat >&2 << END
Not measured: ${missing}vLLM itself,
with its graphs, sleep mode, expandable segments and preemption; several GPUs; NUMA placement; AMD.
END
if [ "$profile" = debug ]; then
  echo "A rehearsal on the fake driver: no figure above is a GPU's." >&2
fi
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: row %s\n' "${failed[@]}" >&2
  exit 1
fi
