#!/usr/bin/env bash
# Gets the Chromium that the page is tested in: `tools/test-chromium.sh FOLDER`. It is Debian's headless package with
# the libraries that this system lacks, unpacked and not installed. Idempotent. Where there is no such package, the
# tests say so.
set -euo pipefail

folder=${1:?usage: tools/test-chromium.sh FOLDER}
if [ -x "$folder/bin/chromium" ]; then
  exit 0
fi
rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/packages"
folder=$(cd "$folder" && pwd)
for own in chromium-headless-shell chromium; do
  if command -v "$own" > /dev/null; then
    ln -s "$(command -v "$own")" "$folder/bin/chromium"
    exit 0
  fi
done
fail() {
  echo "warning: $1; the tests of the page that need a browser do not run" >&2
  exit 0
}
command -v apt-get > /dev/null || fail "there is no apt-get to get Chromium with"
# The package, what an installation would bring along, and a font.
names() {
  apt-get install -q -q -s -y --no-install-recommends chromium-headless-shell fonts-dejavu-core |
    awk '$1 == "Inst" { print $2 }'
}
get() { (cd "$folder/packages" && names | xargs timeout 120 apt-get download -q -q -o APT::Sandbox::User=root); }
get 2> /dev/null || { timeout 120 apt-get update -q -q > /dev/null 2>&1 && get 2> /dev/null; } || true
compgen -G "$folder/packages/chromium-headless-shell_*.deb" > /dev/null ||
  fail "the system's packages have no chromium-headless-shell"
for package in "$folder"/packages/*.deb; do
  dpkg-deb -x "$package" "$folder/root"
done
rm -rf "$folder/packages"
triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2> /dev/null || gcc -print-multiarch)
libraries=$folder/root/usr/lib/$triplet
cat > "$folder/fonts.conf" << EOS
<?xml version="1.0"?>
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir>$folder/root/usr/share/fonts</dir>
  <cachedir>$folder/fonts</cachedir>
  <alias binding="same"><family>system-ui</family><prefer><family>DejaVu Sans</family></prefer></alias>
  <alias binding="same"><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
</fontconfig>
EOS
cat > "$folder/bin/chromium" << EOS
#!/bin/sh
export FONTCONFIG_FILE="$folder/fonts.conf"
export LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio:$folder/root/lib/$triplet"
exec "$folder/root/usr/lib/chromium/chromium-headless-shell" "\$@"
EOS
chmod +x "$folder/bin/chromium"
"$folder/bin/chromium" --version > /dev/null || { rm "$folder/bin/chromium"; fail "Chromium does not start"; }
