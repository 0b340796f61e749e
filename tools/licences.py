"""Checks that every crate and every copied file Forebay is built from has a licence that deny.toml allows: run
`make licences`.

Copied files lie beside a `vendored.toml`, which says what they are, and have the digests that it names. cargo-deny checks more (`make deny`), and takes minutes to build; this takes a second.
A crate passes if its licence expression can be met with the allowed ones alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ALLOWED = set(tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"])


def is_permissive(expression: str) -> bool:
    """Whether `expression` (SPDX, or the older form with a slash) is met by `ALLOWED` alone."""
    words = re.findall(r"\(|\)|[^\s()]+(?: WITH [^\s()]+)?", expression.replace("/", " OR "))
    python = {"(": "(", ")": ")", "AND": "and", "OR": "or"}
    # Only parentheses, `and`, `or` and truth values are left, so evaluating it is safe.
    return bool(eval(" ".join(python.get(word, str(word in ALLOWED)) for word in words)))


def vendored() -> list[str]:
    """What is wrong with the copied files."""
    wrong = []
    notes = sorted(ROOT.glob("crates/**/vendored.toml"))
    if not notes:
        wrong.append("no `vendored.toml` was found")
    for note in notes:
        told = tomllib.loads(note.read_text())
        name = f"{told['name']} {told['version']}"
        if not is_permissive(told["licence"]):
            wrong.append(f"{name} has the licence `{told['licence']}`")
        beside = {path.name for path in note.parent.iterdir()} - {note.name}
        if beside != told["sha256"].keys() or "LICENSE" not in beside:
            wrong.append(f"the files of {name} are not those that {note.relative_to(ROOT)} names")
        for path in (note.parent / file for file in beside & told["sha256"].keys()):
            if hashlib.sha256(path.read_bytes()).hexdigest() != told["sha256"][path.name]:
                wrong.append(f"{path.relative_to(ROOT)} is not as {name} was published")
    return wrong


def main() -> int:
    command = [
        "cargo",
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--all-features",
        "--filter-platform",
        "x86_64-unknown-linux-gnu",
    ]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["packages"]
    bad = [p for p in packages if not p.get("license") or not is_permissive(p["license"])]
    for package in bad:
        print(f"error: {package['name']} {package['version']} has the licence `{package.get('license')}`")
    print(f"licences: {len(packages)} crates, {len(bad)} not allowed")
    wrong = vendored()
    for what in wrong:
        print(f"error: {what}")
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
