#!/usr/bin/env bash
# Tests crates as an aarch64 host runs them, under Debian's qemu: `tools/aarch64.sh FOLDER [CARGO TEST ARGUMENTS]`.
# Debian's cross compiler and qemu-user are unpacked below FOLDER and not installed. Without Debian it fails.
set -euo pipefail

cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: tools/aarch64.sh FOLDER [CARGO TEST ARGUMENTS]}")
shift
root=$folder/root
packages=(qemu-user-static gcc-12-aarch64-linux-gnu gcc-12-aarch64-linux-gnu-base cpp-12-aarch64-linux-gnu
  binutils-aarch64-linux-gnu libc6-arm64-cross libc6-dev-arm64-cross linux-libc-dev-arm64-cross libgcc-s1-arm64-cross
  libgcc-12-dev-arm64-cross)

get() { (cd "$folder/debs" && timeout 300 apt-get download -q -q -o APT::Sandbox::User=root "${packages[@]}"); }
if [ ! -x "$folder/gcc" ]; then
  rm -rf "$folder"
  mkdir -p "$root" "$folder/debs"
  get 2> /dev/null || { timeout 120 apt-get update -q -q && get; } || {
    echo "error: the system's packages have no compiler for aarch64; hint: run this on Debian 12" >&2
    exit 1
  }
  for deb in "$folder"/debs/*.deb; do dpkg-deb -x "$deb" "$root"; done
  rm -rf "$folder/debs"
  # Unpacked elsewhere than built for, the compiler has to be told where its linker and its libraries lie.
  cat > "$folder/gcc.new" << END
#!/bin/sh
export LD_LIBRARY_PATH='$root/usr/lib/x86_64-linux-gnu'
exec '$root/usr/bin/aarch64-linux-gnu-gcc-12' -B'$root/usr/bin/aarch64-linux-gnu-' --sysroot='$root' \
  -L'$root/usr/aarch64-linux-gnu/lib' "\$@"
END
  chmod +x "$folder/gcc.new"
  mv "$folder/gcc.new" "$folder/gcc"
fi
rustup -q target add aarch64-unknown-linux-gnu

export CC_aarch64_unknown_linux_gnu=$folder/gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$folder/gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$root/usr/bin/qemu-aarch64-static -L $root/usr/aarch64-linux-gnu"
cargo test --locked --target aarch64-unknown-linux-gnu "${@:---package=forebay-checksum}"
