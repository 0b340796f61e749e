#!/usr/bin/env python3
"""Takes the pictures of the page that the README shows: the recorded frame of the tests, in Chromium, in both themes.

`make pictures` runs it. Page and policy are those of a real daemon; its frames are replaced by the recorded one. Each
picture carries the digest of what it shows, by which the tests notice that it is an old one.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import urllib.request
import zlib
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
FRAME = ROOT / "crates/cli/tests/golden/frame.json"
CHROMIUM = ROOT / ".cache/chromium/bin/chromium"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTH = 1280
# The picture ends below the card of the hit rate.
END = "section:has(> #rate-chart)"
MARGIN = 14
KEYWORD = b"Source"
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture(theme: str) -> Path:
    return ROOT / f"docs/pictures/page-{theme}.png"


def replay(route: Any) -> None:
    """Answers the page with the recorded frame, as the daemon would: whoever has its history gets no step twice."""
    frame = json.loads(FRAME.read_text())
    if "boot=" in route.request.url:
        for history in (frame["hour"], frame["day"]):
            history.update({name: [] for name, steps in history.items() if isinstance(steps, list)})
    route.fulfill(json=frame)


def served(port: int) -> bytes:
    """The page as a daemon serves it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as reply:
        page: bytes = reply.read()
    return page


def source(page: bytes) -> str:
    """The digest of all that a picture shows."""
    return hashlib.sha256(page + FRAME.read_bytes() + f"{WIDTH} {END} {MARGIN}".encode()).hexdigest()


def take(browser: Any, port: int, theme: str) -> bytes:
    """The upper part of the page, as a PNG."""
    # Without pointers and moving bars, and in the time zone of `forebay top`, which has none.
    context = browser.new_context(
        viewport={"width": WIDTH, "height": 900}, color_scheme=theme, timezone_id="UTC", reduced_motion="reduce"
    )
    tab = context.new_page()
    tab.route("**/frame.json*", replay)
    tab.goto(f"http://127.0.0.1:{port}/")
    tab.wait_for_selector("#rate-chart canvas")
    box = tab.locator(END).bounding_box()
    height = box["y"] + box["height"] + MARGIN
    taken: bytes = tab.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    context.close()
    return taken


def stamped(png: bytes, text: str) -> bytes:
    """`png` with `text` in a chunk of its own, behind its head."""
    body = b"tEXt" + KEYWORD + b"\0" + text.encode("latin-1")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = len(SIGNATURE) + 25
    return png[:end] + chunk + png[end:]


def stamp(png: bytes) -> str:
    """What `stamped` wrote; empty if there is nothing."""
    _, _, behind = png.partition(b"tEXt" + KEYWORD + b"\0")
    return behind[:64].decode("latin-1")


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from playwright.sync_api import sync_playwright
    from rig.daemon import Daemon

    if not CHROMIUM.exists():
        raise SystemExit("error: there is no Chromium\nhint: run tools/test-chromium.sh .cache/chromium")
    with Daemon(capacity_bytes=64 << 20) as daemon, sync_playwright() as driver:
        daemon.start()
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for theme in THEMES:
            path = picture(theme)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(stamped(take(browser, daemon.port, theme), source(served(daemon.port))))
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
        browser.close()


if __name__ == "__main__":
    main()
