#!/usr/bin/env python3
"""Makes the texts in crates/device/src/cuda/kernels of their sources again, and assembles them: `tools/ptx.py [--write]
[FOLDER]`.

Fails if a text differs from the one that is there, unless it is to write it, and if the assembler refuses one for one
of the GPUs below. Compiler and assembler are NVIDIA's packages on PyPI; neither needs a GPU or a driver. FOLDER keeps
them; without one they go again. Status 3: they cannot be had here.
"""

import argparse
import ctypes
import difflib
import pathlib
import subprocess
import sys
import tempfile

KERNELS = pathlib.Path(__file__).parents[1] / "crates/device/src/cuda/kernels"
NAMES = ["copy", "product"]
# The first compiler of CUDA 12, whose text every driver for CUDA 12 loads; a newer one would write a newer dialect.
COMPILER = "nvidia-cuda-nvrtc-cu12==12.0.76"
# The last assembler of CUDA 12: it knows more GPUs, and refuses what a driver of today would refuse.
ASSEMBLER = "nvidia-cuda-nvcc-cu12==12.9.86"
# C++03, because the compiler adds 38 variables that nobody needs to newer C++.
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++03"]
# A100 and A30; A10 and RTX 30; L4, L40 and RTX 40; H100 and H200; B200; RTX 50 and RTX PRO of that generation.
GPUS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


def fetch(package: str, folder: pathlib.Path) -> pathlib.Path:
    place = folder / package
    if not (place / "complete").exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries=1"]
        got = subprocess.run(
            [*pip, "install", "--no-deps", "--upgrade", "--target", place, package],
            check=False,
            capture_output=True,
            text=True,
        )
        if got.returncode != 0:
            reason = (got.stderr.strip().splitlines() or ["no reason was given"])[-1]
            print(f"cannot run: {package} cannot be had here: {reason}", file=sys.stderr)
            sys.exit(3)
        (place / "complete").touch()
    return place


def compiled(compiler: pathlib.Path, kernel: str) -> str:
    (library,) = compiler.glob("**/libnvrtc.so.12")
    nvrtc = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    path = KERNELS / f"{kernel}.cu"
    source, name = path.read_bytes(), path.name.encode()
    options = (ctypes.c_char_p * len(OPTIONS))(*map(str.encode, OPTIONS))
    if status := nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None):
        sys.exit(f"the compiler does not begin: status {status}")
    status = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    what = "PTX" if status == 0 else "ProgramLog"
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    if status:
        sys.exit(f"the compiler refuses {path}:\n{text.value.decode()}")
    return text.value.decode().rstrip("\n") + "\n"


def assemble(assembler: pathlib.Path, ptx: pathlib.Path) -> None:
    (ptxas,) = assembler.glob("**/bin/ptxas")
    ptxas.chmod(0o755)
    for gpu in GPUS:
        said = subprocess.run(
            [ptxas, "--verbose", "--warning-as-error", f"--gpu-name={gpu}", "--output-file=/dev/null", ptx],
            check=False,
            capture_output=True,
            text=True,
        )
        if said.returncode != 0:
            sys.exit(f"the assembler refuses {ptx} for {gpu}:\n{said.stderr}")
        registers = next((line for line in said.stderr.splitlines() if "registers" in line), "")
        print(f"{ptx.stem} on {gpu}: {registers.strip()}")


def main(folder: pathlib.Path, writes: bool) -> None:
    for kernel in NAMES:
        text, ptx = compiled(fetch(COMPILER, folder), kernel), KERNELS / f"{kernel}.ptx"
        if writes:
            ptx.write_text(text)
        before = ptx.read_text().splitlines()
        if difference := list(difflib.unified_diff(before, text.splitlines(), "there", "made", lineterm="")):
            sys.exit("\n".join([f"{ptx} is not what the compiler makes of {kernel}.cu:", *difference]))
        assemble(fetch(ASSEMBLER, folder), ptx)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the text that is there")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="where compiler and assembler are kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.folder or pathlib.Path(temporary), given.write)
