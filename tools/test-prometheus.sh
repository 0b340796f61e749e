#!/usr/bin/env bash
# Gets the Prometheus that the alert rules and the dashboard are tested on: `tools/test-prometheus.sh FOLDER`. It is
# Debian's package, unpacked and not installed. Idempotent. Where there is no such package, the tests say so.
set -euo pipefail

folder=${1:?usage: tools/test-prometheus.sh FOLDER}
if [ -x "$folder/bin/prometheus" ] && [ -x "$folder/bin/promtool" ]; then
  exit 0
fi
rm -rf "$folder"
mkdir -p "$folder/bin"
if command -v prometheus promtool > /dev/null; then
  ln -s "$(command -v prometheus)" "$(command -v promtool)" "$folder/bin/"
  exit 0
fi
get() { (cd "$folder" && timeout 120 apt-get download -q -q -o APT::Sandbox::User=root prometheus); }
if command -v apt-get > /dev/null; then
  get 2> /dev/null || { timeout 120 apt-get update -q -q > /dev/null 2>&1 && get 2> /dev/null; } || true
fi
if ! compgen -G "$folder/prometheus_*.deb" > /dev/null; then
  echo "warning: the system's packages have no prometheus; the tests of contrib/ that need it do not run" >&2
  exit 0
fi
dpkg-deb -x "$folder"/prometheus_*.deb "$folder"
mv "$folder/usr/bin/prometheus" "$folder/usr/bin/promtool" "$folder/bin/"
rm -rf "$folder/usr" "$folder/etc" "$folder/lib" "$folder/var" "$folder"/*.deb
