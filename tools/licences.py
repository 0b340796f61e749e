"""Checks that every crate Forebay is built from has a licence that deny.toml allows: run `make licences`.

cargo-deny checks more (`make deny`), and takes minutes to build; this takes a second.
A crate passes if its licence expression can be met with the allowed ones alone.
"""

from __future__ import annotations

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
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
