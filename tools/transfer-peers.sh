#!/usr/bin/env bash
# Gets what `forebay bench transfer --peers` compares with: `tools/transfer-peers.sh FOLDER`. Idempotent.
#
# NIXL and Mooncake come into an environment of their own below FOLDER, without what they need for GPUs. Debian's UCX,
# and the libraries that Mooncake loads, are unpacked there and not installed. FOLDER/python finds all of them.
set -euo pipefail

cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: tools/transfer-peers.sh FOLDER}")
packages=(libucx0 libibverbs1 ibverbs-providers librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1)
want=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$folder/.stamp" 2> /dev/null || true)" = "$want" ]; then
  exit 0
fi
rm -rf "$folder"
mkdir -p "$folder/root" "$folder/debs"

"${PYTHON:-python3}" -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# Their metadata asks for torch and CUDA, which transfers of host memory do not load.
pip install --no-deps \
  'nixl==1.5.1' 'nixl-cu12==1.5.1' 'mooncake-transfer-engine-non-cuda==0.3.13.post1' 'numpy==2.3.5'

get() { (cd "$folder/debs" && timeout 300 apt-get download -q -q -o APT::Sandbox::User=root "${packages[@]}"); }
get 2> /dev/null || { timeout 120 apt-get update -q -q && get; } || {
  echo "error: the system's packages have no UCX; hint: run this on Debian 12" >&2
  exit 1
}
for deb in "$folder"/debs/*.deb; do dpkg-deb -x "$deb" "$folder/root"; done
rm -rf "$folder/debs"

cat > "$folder/python" << END
#!/bin/sh
export LD_LIBRARY_PATH='$folder/root/usr/lib/x86_64-linux-gnu:$folder/root/lib/x86_64-linux-gnu'
exec '$folder/venv/bin/python' "\$@"
END
chmod +x "$folder/python"
echo "$want" > "$folder/.stamp"
