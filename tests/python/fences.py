"""What the pages print between fences, for those who do what they read.

Holds true: each fence says what it is, in the word behind its first marks: `sh` for commands, `python`, `toml` for the
daemon's configuration; any other word is for what is only to be read.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Each of its commands is a run of tests in the checkout; test_claims.py compares them with the README.
OTHERS = {"docs/claims.md"}
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Those for whoever uses Forebay, below the checkout."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [name for page in found if (name := str(page.relative_to(ROOT))) not in OTHERS]


def fences(page: str) -> list[Fence]:
    text = (ROOT / page).read_text()
    found = []
    for fence in FENCE.finditer(text):
        lines = fence["text"].splitlines()
        inner = "\n".join(line.removeprefix(fence["indent"]) for line in lines)
        found.append(Fence(page, text.count("\n", 0, fence.start()) + 2, fence["kind"], inner))
    return found


def commands(fence: Fence) -> list[str]:
    """Of a shell's fence, each with its continued lines and without its comment, as `bash` reads them."""
    found, lines = [], ""
    for line in fence.text.splitlines():
        lines += line
        if line.endswith("\\") or not is_whole(lines):
            lines += "\n"
            continue
        found.append(lines)
        lines = ""
    assert not lines, f"{fence} ends within a command: {lines}"
    return [bare for command in found if (bare := re.sub(r"(^| +)# .*", "", command).strip())]


def is_whole(command: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode == 0
