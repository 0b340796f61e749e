#!/usr/bin/env bash
# Runs vLLM's own tests of its offloading connector on Forebay's, and those of its filesystem tier on Forebay's tier:
# `tools/vllm-own-tests.sh VENV CACHE [pytest arguments]`.
#
# Wheels carry no tests, so they come from the source distribution, which is fetched by pip's own client without being
# built, and checked against the digest in tools/versions.env. The plugins in tests/vllm_own say how Forebay takes
# vLLM's place in them, and which are left out.
set -euo pipefail

cd "$(dirname "$0")/.."
repository=$PWD
venv=$(realpath "${1:?usage: tools/vllm-own-tests.sh VENV CACHE [pytest arguments]}")
cache=${2:?usage: tools/vllm-own-tests.sh VENV CACHE [pytest arguments]}
shift 2
. tools/versions.env
mkdir -p "$cache"
sources=$(realpath "$cache")/tests-$VLLM_TESTS_VERSION

if [ ! -d "$sources/tests/v1/kv_offload" ]; then
  echo "getting the tests of vLLM $VLLM_TESTS_VERSION" >&2
  rm -rf "$sources.part"
  "$venv/bin/python" - "$VLLM_TESTS_VERSION" "$VLLM_TESTS_SHA256" "$sources.part" <<'PY'
import hashlib
import sys
import tarfile
import tempfile
from pathlib import Path

from pip._internal.commands import create_command
from pip._internal.network.download import Downloader
from pip._vendor.packaging.specifiers import SpecifierSet

version, digest, target = sys.argv[1:]
command = create_command("download")
with command.main_context(), tempfile.TemporaryDirectory() as directory:
    options, _ = command.parse_args(["--quiet", "--no-deps", "--no-binary", "vllm", f"vllm=={version}"])
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    found = finder.find_best_candidate("vllm", SpecifierSet(f"=={version}")).best_candidate
    assert found is not None, f"there is no source distribution of vllm {version}"
    try:
        file, _ = Downloader(session, "off")(found.link, directory)
    except TypeError:  # pip 25.2 and newer
        file, _ = Downloader(session, "off", 0)(found.link, directory)
    found_digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert found_digest == digest, f"its digest is {found_digest}, and tools/versions.env says {digest}"
    wanted = ("LICENSE", "tests/__init__.py", "tests/v1/__init__.py", "tests/v1/kv_connector/", "tests/v1/kv_offload/")
    with tarfile.open(file) as packed:
        for member in packed:
            member.name = member.name.partition("/")[2]
            if member.isfile() and member.name.startswith(wanted):
                packed.extract(member, target, filter="data")
PY
  rm -rf "$sources"
  mv "$sources.part" "$sources"
fi

# own PLUGIN TESTS: runs them with a plugin that puts Forebay in vLLM's place.
own() {
  (
    cd "$sources"
    env HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
      CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 \
      PYTHONPATH="$sources:$repository/tests/vllm_own" \
      "$venv/bin/python" -m pytest -q -p "$1" -p no:cacheprovider --disable-warnings "${@:3}" "$2"
  )
}

own forebay_in_place tests/v1/kv_connector/unit/offloading_connector "$@"
own tier_in_place tests/v1/kv_offload/tiering/test_fs_tier.py "$@"
