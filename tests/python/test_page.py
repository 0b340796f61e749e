"""The page at `/` in a real Chromium, against the real daemon under load.

The browser is Debian's (`tools/test-chromium.sh`), driven by Playwright. SCREENSHOTS names a folder for the pictures.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from forebay import Client
from harness import Engine, Group, Model, hashes
from rig.daemon import Daemon, free_port
from rig.process import wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="cannot run: Playwright is not installed")

CHROMIUM = Path(__file__).parents[2] / ".cache/chromium/bin/chromium"
SECONDS = 60.0
WIDTHS = {"desk": 1280, "phone": 390}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PROMPT = 50
# More blocks than the pool has room for, and looked up often enough for estimates.
PROMPTS = 250
LOOKUPS = 420
GROUP = Group(0, ((0, 4096),))
MODEL = Model(pages=(4096,), stride=4096, groups=(GROUP,), rows=PROMPT)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip("cannot run: the system's packages have no Chromium (tools/test-chromium.sh)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class View:
    """One page, and all that it asked for and complained of."""

    tab: Any
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        # Units are set with spaces that do not break.
        text: str = self.tab.inner_text(selector)
        return " ".join(text.split())

    def rows(self, table: str) -> dict[str, dict[str, str]]:
        """Cells by the row's and the column's headings."""
        return dict(self.tab.evaluate(ROWS, table))

    def wait(self, selector: str, words: str) -> str:
        wait_until(f"{selector} says `{words}`", lambda: words in self.text(selector), SECONDS)
        return self.text(selector)

    def overflow(self) -> int:
        """By how much the page is wider than its window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        width: int = self.tab.evaluate(script)
        return width

    def show(self, width: str, theme: str) -> None:
        self.tab.set_viewport_size({"width": WIDTHS[width], "height": 900})
        self.tab.emulate_media(color_scheme=theme)

    def picture(self, name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            # Charts are drawn anew a moment after the width has changed.
            self.tab.wait_for_timeout(600)
            self.tab.screenshot(path=f"{folder}/{name}.png", full_page=True)


ROWS = """id => {
  const flat = node => node.innerText.replace(/\\s+/g, ' ').trim();
  const table = document.getElementById(id);
  const names = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
  const name = row => row.cells[0].querySelector('span').textContent;
  const cells = row => Object.fromEntries([...row.cells].map((cell, at) => [names[at], flat(cell)]));
  const rows = [...table.tBodies[0].rows].filter(row => row.querySelector('th'));
  return Object.fromEntries(rows.map(row => [name(row), cells(row)]));
}"""


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens an address in a view of its own; fails if a page complained."""
    context = browser.new_context(viewport={"width": WIDTHS["desk"], "height": 900})

    def opened(address: str, script: str = "") -> View:
        view = View(context.new_page())
        view.tab.set_default_timeout(SECONDS * 1000)
        view.tab.on("console", lambda message: view.complaints.append(message.text))
        view.tab.on("pageerror", lambda error: view.complaints.append(str(error)))
        view.tab.on("dialog", lambda dialog: view.complaints.append(f"dialog {dialog.message}"))
        view.tab.on("request", lambda request: view.asked.append(request.url))
        if script:
            view.tab.add_init_script(script)
        view.tab.goto(address)
        return view

    yield opened
    context.close()


def address(daemon: Daemon) -> str:
    return f"http://127.0.0.1:{daemon.port}/"


@contextlib.contextmanager
def loaded(daemon: Daemon, engine_id: str = "llama-70b-a") -> Iterator[Engine]:
    """An engine that has stored more than the pool holds, looked up some of it, and still holds a lease."""
    with Engine(daemon.socket.parent, model=MODEL, engine_id=engine_id) as engine:
        engine.wait_ready()
        for prompt in range(PROMPTS):
            keys = hashes(f"prompt {prompt}", PROMPT)
            engine.store(GROUP, keys, list(range(PROMPT)))
        for at in range(LOOKUPS):
            # A few prompts come often, the others seldom.
            prompt = at % 7 if at % 3 else at * 31 % (PROMPTS + 60)
            engine.look_up(hashes(f"prompt {prompt}", PROMPT)).release()
        held = engine.look_up(hashes("prompt 1", PROMPT))
        yield engine
        held.release()


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "store").mkdir()
    fs = {"directories": [str(tmp_path / "store")], "capacity_bytes": 256 << 20}
    with Daemon(capacity_bytes=32 << 20, tiers={"tier.fs": fs}, ssd_bytes=128 << 20, ssd_admission="all") as daemon:
        yield daemon.start()


def bytes_of(text: str) -> float:
    """Of the first size in `text`."""
    [(value, unit)] = re.findall(r"([\d.,]+) (B|KiB|MiB|GiB)\b", text)[:1]
    return float(value.replace(",", "")) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)


def whole(text: str) -> int:
    return int(re.sub(r"[^\d]", "", text.split()[0]))


REASONS = {
    "Never seen": "never_seen",
    "Evicted": "evicted",
    "Not kept": "refused",
    "Failed": "failed",
    "Too slow": "too_slow",
    "Not yet": "not_yet",
    "Other namespace": "other_namespace",
    "Over limit": "over_limit",
    "Still loading": "promotion_unfinished",
}


def differences(view: View, metrics: dict[str, float]) -> list[str]:
    """What the page says otherwise than `/metrics` of the same moment."""
    keys, hits = metrics["forebay_lookup_keys_total"], metrics["forebay_lookup_hits_total"]
    pairs = {
        "keys": (whole(view.text("#figure-keys .more")), keys),
        "hit rate": (view.text("#figure-hit .more"), f"{100 * hits / keys:.1f} % since the start"),
        "capacity": (
            bytes_of(view.text("#figure-used .more").split(" of ")[1]),
            metrics["forebay_pool_capacity_bytes"],
        ),
    }
    shown = {reason: whole(row["Since the start"]) for reason, row in view.rows("misses").items()}
    for name, reason in REASONS.items():
        count = metrics[f'forebay_lookup_misses_total{{reason="{reason}"}}']
        pairs[f"misses {reason}"] = (shown.get(name, 0), count)
    used = bytes_of(view.text("#figure-used .more"))
    # A size has at least three digits.
    if abs(used - metrics["forebay_pool_used_bytes"]) > 0.01 * used:
        pairs["used"] = (used, metrics["forebay_pool_used_bytes"])
    pinned = bytes_of(view.rows("pool")["Pinned"]["Size"])
    if abs(pinned - metrics["forebay_pool_pinned_bytes"]) > 0.01 * pinned:
        pairs["pinned"] = (pinned, metrics["forebay_pool_pinned_bytes"])
    return [f"{name}: {said} is not {true}" for name, (said, true) in pairs.items() if said != true]


def test_the_page_says_what_metrics_say_in_both_themes_and_on_a_phone(tiered: Daemon, opened: Any) -> None:
    client = Client(str(tiered.socket.parent), deadline=20.0)
    view = opened(address(tiered))
    with loaded(tiered):
        namespace = client.open_namespace({"model": HOSTILE, "tenant": HOSTILE}, {0: 4096})
        client.put(namespace, 0, [(key, key * 128) for key in hashes("other", 20)])
        # The load has ended: both sides stand still, but the page is up to two seconds behind.
        last: list[str] = []

        def is_equal() -> bool:
            last[:] = differences(view, tiered.metrics())
            return not last

        try:
            wait_until("the page says what the metrics say", is_equal, SECONDS)
        except AssertionError:
            raise AssertionError("; ".join(last)) from None
        # Steps of the history take five seconds.
        for chart in ("rate-chart", "fill-chart", "flow-chart"):
            view.tab.wait_for_selector(f"#{chart} canvas")
        assert "Here you are: 32" in view.wait("#memory-curve figcaption", "is there")
        assert set(view.rows("tiers")) == {"Pool", "SSD", "Directory"}
        assert view.rows("tiers")["SSD"]["State"] == "✓ serving"
        engine = view.rows("engines")["llama-70b-a"]
        assert (engine["State"], engine["Workers attached"]) == ("✓ ready", "1 of 1")
        assert engine["Leased"] == f"{PROMPT} blocks"
        # A name is text, whatever it is.
        assert HOSTILE in view.rows("namespaces") and HOSTILE in view.rows("tenants")
        assert view.text("#verdict").startswith(("✓ Nothing is wrong.", "⚠ The daemon serves"))
        for width in WIDTHS:
            for theme in THEMES:
                view.show(width, theme)
                wait_until(f"nothing is cut off, {width}", lambda: view.overflow() <= 0, SECONDS)
                view.picture(f"load-{width}-{theme}")
    assert view.complaints == []
    assert {url.partition("?")[0] for url in view.asked if not url.startswith("data:")} == {
        address(tiered),
        f"{address(tiered)}frame.json",
    }


def test_a_daemon_without_traffic_shows_words_and_no_zeros(daemon: Daemon, opened: Any) -> None:
    view = opened(address(daemon))
    view.wait("#verdict", "✓ Nothing is wrong.")
    for figure in ("hit", "ceiling", "optimum"):
        assert view.text(f"#figure-{figure} .value") == "too little traffic yet"
    assert view.text("#engines").endswith("No engine has connected yet.")
    assert "too little traffic yet: 0 keys of 10,000" in view.text("#memory-curve")
    assert "nothing was looked up" in view.text("#misses")
    assert "The pool holds no block yet." in view.text("#namespaces")
    for width in WIDTHS:
        view.show(width, "light")
        wait_until(f"nothing is cut off, {width}", lambda: view.overflow() <= 0, SECONDS)
        view.picture(f"empty-{width}")
    assert view.complaints == []


def test_a_tier_that_does_not_serve_is_the_first_thing_said(opened: Any) -> None:
    nobody = {"urls": [f"redis://127.0.0.1:{free_port()}"]}
    with Daemon(capacity_bytes=64 << 20, tiers={"tier.redis": nobody}) as daemon:
        daemon.start()
        view = opened(f"{address(daemon)}#tier-redis")
        said = view.wait("#verdict", "⚠ The daemon serves, but not with all its tiers.")
        assert "Redis: " in said
        row = view.rows("tiers")["Redis"]
        assert not row["State"].startswith("✓"), row
        assert view.text("#checks").count("impaired") == 1
        wait_until(
            "the row that an alert links to is in sight",
            lambda: view.tab.evaluate(
                "document.getElementById('tier-redis').getBoundingClientRect().top < innerHeight"
            ),
            SECONDS,
        )
        for width, theme in (("desk", "dark"), ("phone", "light")):
            view.show(width, theme)
            view.picture(f"sick-{width}-{theme}")
        assert view.complaints == []


def test_the_page_says_that_the_daemon_is_gone_and_comes_back_by_itself(daemon: Daemon, opened: Any) -> None:
    view = opened(address(daemon))
    view.wait("#verdict", "✓ Nothing is wrong.")
    daemon.kill()
    view.wait("#verdict", "✕ The daemon does not answer since")
    assert view.tab.get_attribute("#live", "class") == "stale"
    view.show("phone", "light")
    view.picture("gone-phone-light")
    daemon.start()
    view.wait("#verdict", "The daemon was started again at")
    assert "✓ Nothing is wrong." in view.text("#verdict")
    assert view.tab.get_attribute("#live", "class") == ""
    # The browser itself reports the connections that failed; the page reports nothing.
    assert all("ERR_" in complaint for complaint in view.complaints), view.complaints


def test_a_reader_hears_headings_captions_and_what_charts_show(tiered: Daemon, opened: Any) -> None:
    view = opened(address(tiered))
    with loaded(tiered):
        for chart in ("#rate-chart canvas", "#fill-chart canvas", "#flow-chart canvas"):
            view.tab.wait_for_selector(chart)
        headings = [heading for heading in view.tab.locator("h1, h2").all_inner_texts() if heading]
        assert headings[0].startswith("Forebay on ") and "Tiers" in headings and "Engines" in headings
        assert view.tab.get_attribute("#verdict", "aria-live") == "polite"
        unnamed = "[...document.querySelectorAll('table')].filter(t => !t.closest('.u-legend, .uplot') && !t.caption)"
        assert view.tab.evaluate(f"{unnamed}.length") == 0
        spoken = view.tab.get_by_role("img").all()
        assert len(spoken) >= 3
        for chart in spoken:
            assert len(chart.get_attribute("aria-label")) > 20
        # On a phone rows are laid out as lists, and stay rows to a reader.
        view.show("phone", "light")
        tiers = view.tab.get_by_role("table", name="Tiers, nearest first")
        assert tiers.get_by_role("row").count() == 4
        assert tiers.get_by_role("rowheader", name="SSD").count() == 1
        # The same as figures, reached by keyboard.
        view.tab.locator("#fill-chart summary").press("Enter")
        rows = view.tab.locator("#fill-chart details table tbody tr")
        wait_until("the steps stand in a table", lambda: rows.count() >= 2, SECONDS)
        view.tab.locator("#span-day").press("Enter")
        assert view.tab.get_attribute("#span-day", "aria-pressed") == "true"
        view.wait("#rate-chart", "there is no history yet")
    assert view.complaints == []


def test_the_page_asks_only_while_somebody_looks_and_at_most_once_a_second(daemon: Daemon, opened: Any) -> None:
    hidden = "Object.defineProperty(document, 'visibilityState', {get: () => window.seen || 'visible'});"
    view = opened("about:blank", hidden)
    view.tab.clock.install()
    view.tab.goto(address(daemon))

    def frames() -> int:
        return sum("frame.json" in url for url in view.asked)

    def after(milliseconds: int) -> int:
        """Frames asked for by then; the answer to each is awaited."""
        view.tab.clock.run_for(milliseconds)
        view.tab.wait_for_load_state("networkidle")
        return frames()

    view.wait("#verdict", "✓")
    view.tab.clock.pause_at(view.tab.evaluate("Date.now()") + 5000)
    view.tab.wait_for_load_state("networkidle")
    before = frames()
    change = "seen => { window.seen = seen; document.dispatchEvent(new Event('visibilitychange')); }"
    for _ in range(5):
        view.tab.evaluate(change, "visible")
    assert frames() <= before + 1, "to come back ten times is not to ask ten times"
    before = after(900)
    assert after(10_000) > before
    view.tab.evaluate(change, "hidden")
    before = after(2_000)
    assert after(60_000) == before
    view.tab.evaluate(change, "visible")
    wait_until("it asks again", lambda: after(1000) > before, SECONDS)


class Prefix(BaseHTTPRequestHandler):
    """A proxy that serves a daemon below a path, and keeps the name that the browser asked for, as Caddy does."""

    port = 0
    prefix = "/ops/gpu-07"

    def do_GET(self) -> None:
        path = self.path.removeprefix(self.prefix) or "/"
        if path == self.path:
            self.send_error(404)
            return
        daemon = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        daemon.request("GET", path, headers={"Host": self.headers["Host"]})
        reply = daemon.getresponse()
        body = reply.read()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("slash", ["/", ""])
def test_the_page_works_below_a_path_of_a_proxy(daemon: Daemon, opened: Any, slash: str) -> None:
    handler = type("Handler", (Prefix,), {"port": daemon.port})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        below = f"http://localhost:{proxy.server_port}{Prefix.prefix}"
        view = opened(below + slash)
        view.wait("#verdict", "✓ Nothing is wrong.")
        asked = {url.partition("?")[0] for url in view.asked if not url.startswith("data:")}
        assert asked == {below + slash, f"{below}/frame.json"}
        assert view.complaints == []
        proxy.shutdown()
