#!/usr/bin/env bash
# Installs what building and testing the Python side needs: `tools/test-tools.sh VENV`. Idempotent.
set -euo pipefail

venv=${1:?usage: tools/test-tools.sh VENV}
stamp=$venv/.test-tools
want=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
  exit 0
fi
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install \
  'datasketches==5.2.0' 'maturin==1.16.0' 'mypy==2.4.1' 'playwright==1.65.2' 'pytest==9.2.0' \
  'pytest-xdist==3.8.0'
echo "$want" > "$stamp"
