#!/usr/bin/env bash
# Gets the S3 server that the object tier is tested on: `tools/test-objects.sh FOLDER`. Idempotent.
set -euo pipefail

folder=${1:?usage: tools/test-objects.sh FOLDER}
python=${PYTHON:-python3}
stamp=$folder/.complete
want=$(sha256sum "$0" | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
  exit 0
fi
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip --disable-pip-version-check --quiet install \
  'moto[s3]==5.2.5' 'flask==3.1.3' 'flask-cors==6.0.5'
echo "$want" > "$stamp"
