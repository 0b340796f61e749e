#!/usr/bin/env bash
# Installs what `make lint` needs beside cargo: `tools/lint-tools.sh FOLDER`. Idempotent. Neither vLLM nor a build of
# Forebay is needed for it.
set -euo pipefail

folder=${1:?usage: tools/lint-tools.sh FOLDER}
python=${PYTHON:-python3}
stamp=$folder/.complete
want=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
  exit 0
fi
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip --disable-pip-version-check --quiet install 'ruff==0.17.5'
echo "$want" > "$stamp"
