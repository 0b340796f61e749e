"""Where things are: the checkout, its caches, the binary under test.

Everything the rig writes outside a test's own temporary directory lies under `.cache/` in the checkout and can be
deleted at any time.
"""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / ".cache"


def forebay_binary() -> Path:
    """The `forebay` binary under test: `FOREBAY_BIN`, or the newest of the release and debug builds."""
    if named := os.environ.get("FOREBAY_BIN"):
        return Path(named)
    builds = [CHECKOUT / "target" / profile / "forebay" for profile in ("release", "debug")]
    found = [path for path in builds if path.exists()]
    if not found:
        raise FileNotFoundError("no `forebay` binary: run `cargo build -p forebay-cli`, or set FOREBAY_BIN")
    return max(found, key=lambda path: path.stat().st_mtime)
