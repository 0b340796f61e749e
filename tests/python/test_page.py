"""The page at `/` in a real Chromium, against the real daemon under load, and with a day that was recorded.

The browser is Debian's (`tools/test-chromium.sh`), driven by Playwright. SCREENSHOTS names a folder for the pictures.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from forebay import Client
from harness import Engine, Group, Model, hashes
from rig.daemon import Daemon, free_port
from rig.process import wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="cannot run: Playwright is not installed")

ROOT = Path(__file__).parents[2]
CHROMIUM = ROOT / ".cache/chromium/bin/chromium"
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
    context = browser.new_context(viewport={"width": WIDTHS["desk"], "height": 900}, timezone_id="UTC")

    def opened(address: str, script: str = "", replay: Callable[[Any], None] | None = None) -> View:
        view = View(context.new_page())
        view.tab.set_default_timeout(SECONDS * 1000)
        view.tab.on("console", lambda message: view.complaints.append(message.text))
        view.tab.on("pageerror", lambda error: view.complaints.append(str(error)))
        view.tab.on("dialog", lambda dialog: view.complaints.append(f"dialog {dialog.message}"))
        view.tab.on("request", lambda request: view.asked.append(request.url))
        if script:
            view.tab.add_init_script(script)
        if replay:
            view.tab.route("**/frame.json*", replay)
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


def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools/pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded() -> dict[str, Any]:
    """A frame with a full hour and a full day, with an alarm and a sick tier: that of the tests of `forebay top`."""
    frame: dict[str, Any] = json.loads(pictures().FRAME.read_text())
    assert [len(frame[span]["end_ms"]) for span in ("hour", "day")] == [720, 288]
    return frame


def percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * ratio:.1f} %"


def scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    """Three digits and a unit."""
    at = 0
    while value >= step * 0.9995 and at < len(units) - 1:
        value /= step
        at += 1
    return f"{value:.{0 if at == 0 or value >= 99.95 else 1 if value >= 9.995 else 2}f} {units[at]}"


def size(count: float) -> str:
    return scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def speed(count: float) -> str:
    return scaled(count, 1000, ("B/s", "kB/s", "MB/s", "GB/s"))


def amount(count: int) -> str:
    return f"{count:,}" if count < 1e7 else scaled(count, 1000, ("", "k", "M", "G"))


# Of the canvas of a chart: how wide it is drawn on, and in which columns a line of this colour was seen.
COLUMNS = """([id, name]) => {
  const [r, g, b] = getComputedStyle(document.documentElement).getPropertyValue(name).trim().match(/\\w\\w/g)
    .map(part => parseInt(part, 16));
  const canvas = document.querySelector(`#${id} canvas`);
  // Of a copy: Chromium complains of whoever reads a canvas twice.
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data, width, height } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const near = at => Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 60;
  const columns = [];
  for (let x = 0; x < width; x += 1)
    for (let y = 0; y < height; y += 1)
      if (data[4 * (y * width + x) + 3] > 200 && near(4 * (y * width + x))) { columns.push(x); break; }
  return [document.querySelector(`#${id} .u-over`).clientWidth * devicePixelRatio, columns];
}"""


def is_drawn(view: View, chart: str, colour: str, gap: float) -> bool:
    """Whether its line goes from end to end, but for a gap of this share in between."""
    space, columns = view.tab.evaluate(COLUMNS, [chart, colour])
    if not columns or columns[-1] - columns[0] < 0.97 * space:
        return False
    return bool(0.97 - gap < len(columns) / space < 1.01 - 0.5 * gap)


def is_told(view: View, ratios: list[float]) -> bool:
    """Whether these stand in the last row of the table below the first chart."""
    _, *told = view.tab.locator("#rate-chart details tbody tr:last-child > *").all_inner_texts()
    return [" ".join(cell.split()) for cell in told] == [percent(ratio) for ratio in ratios]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_full_hour_and_a_full_day_are_drawn_from_end_to_end(
    daemon: Daemon, opened: Any, recorded: dict[str, Any], width: str, theme: str
) -> None:
    view = opened("about:blank", replay=pictures().replay)
    view.show(width, theme)
    view.tab.goto(address(daemon))
    charts = {
        "rate-chart": ("Hit rate", "--hit", "hit_ratio", percent),
        "fill-chart": ("Fill of the pool", "--ready", "used_bytes", size),
        "flow-chart": ("Bytes by second", "--hit", "hit_bytes_per_second", speed),
    }
    view.tab.wait_for_selector("#rate-chart canvas")
    # The same as figures.
    view.tab.click("#rate-chart summary")
    for span, name in (("hour", "1 h"), ("day", "1 d")):
        view.tab.click(f"#span-{span}")
        steps = recorded[span]
        for chart, (what, colour, series, told) in charts.items():
            values = [value for value in steps[series] if value is not None]
            said = f"last {told(values[-1])}, between {told(min(values))} and {told(max(values))}"
            caption = view.wait(f"#{chart} figcaption", f"{what} over {name}.")
            assert said in caption, f"{said} is not in {caption}"
            # Nobody asked for half an hour of the day: the hit rate has no value there.
            gap = steps[series].count(None) / len(steps[series])
            wait_until(f"{chart}, {span}", functools.partial(is_drawn, view, chart, colour, gap), SECONDS)
        ratios = [steps[series][-1] for series in ("hit_ratio", "ceiling_ratio", "optimum_ratio")]
        wait_until("the last step is told", functools.partial(is_told, view, ratios), SECONDS)
        wait_until(f"nothing is cut off, {width}", lambda: view.overflow() <= 0, SECONDS)
        view.picture(f"recorded-{span}-{width}-{theme}")
    assert view.complaints == []


def test_a_recorded_day_is_told_with_its_alarm_and_the_way_to_its_figures(
    daemon: Daemon, opened: Any, recorded: dict[str, Any]
) -> None:
    view = opened(address(daemon), replay=pictures().replay)
    said = view.wait("#verdict", "⚠ The daemon serves, but not with all its tiers.")
    [alarm] = recorded["alarms"]
    for told in (alarm["cause"], alarm["hint"].replace("`", ""), "Redis: sick: connection refused."):
        assert told in said
    assert view.tab.locator("#verdict code").all_inner_texts() == re.findall(r"`(.+?)`", alarm["hint"])
    for link, target in (("Show the tier", "tier-redis"), ("Show the hit rate", "rate-title")):
        view.tab.evaluate("scrollTo(0, 0)")
        view.tab.get_by_role("link", name=link).click()
        place = f"document.getElementById('{target}').getBoundingClientRect()"
        wait_until(
            f"{target} is in sight",
            lambda at=place: view.tab.evaluate(f"{at}.top >= 0 && {at}.bottom <= innerHeight"),
            SECONDS,
        )

    lookups, pool, estimates = recorded["lookups"], recorded["pool"], recorded["estimates"]
    figures = {
        "hit": (percent(lookups["hit_ratio"]), f"{percent(lookups['hits'] / lookups['keys'])} since the start"),
        "ceiling": (percent(estimates["ceiling_ratio"]), "a cache without limit"),
        "optimum": (percent(estimates["optimum_ratio"]), "the best cache of this size"),
        "keys": (f"{lookups['keys_per_second']:,.0f}/s", f"{amount(lookups['keys'])} keys since the start"),
        "used": (
            percent(pool["used_bytes"] / pool["capacity_bytes"]),
            f"{size(pool['used_bytes'])} of {size(pool['capacity_bytes'])}",
        ),
        "saved": (amount(recorded["saved"]["tokens"]), "at least 4 d 20 h of prefill"),
    }
    assert {
        name: (view.text(f"#figure-{name} .value"), view.text(f"#figure-{name} .more")) for name in figures
    } == figures
    windows = [
        (percent(window["hit_ratio"]), percent(window["ceiling_ratio"]), amount(window["keys"]))
        for window in recorded["windows"]
    ]
    rows = list(view.rows("windows").values())[1:]
    assert [(row["Hit rate"], row["Ceiling"], row["Keys"]) for row in rows] == windows
    misses = {
        miss["reason"]: (f"{amount(miss['keys'])} keys", percent(miss["share_ratio"]))
        for miss in recorded["misses"]
        if miss["keys"]
    }
    shown = view.rows("misses").items()
    assert {REASONS[name]: (row["Since the start"], row["Of misses, 15 min"]) for name, row in shown} == misses
    tiers = [(percent(tier["share_ratio"]), speed(tier["up_bytes_per_second"])) for tier in recorded["tiers"]]
    assert [(row["Of hits, 15 min"], row["Up"]) for row in view.rows("tiers").values()] == tiers
    engines = {engine["engine_id"]: percent(engine["hit_ratio"]) for engine in recorded["engines"]}
    for name, ratio in engines.items():
        assert view.rows("engines")[name]["Hit rate now"] == ratio.replace("–", "no lookups")
    for figure, curve, present in (
        ("memory-curve", estimates["memory_curve"], pool["capacity_bytes"]),
        ("disk-curve", estimates["disk_curve"], estimates["disk_bytes"]),
    ):
        here = next(point for point in curve if point["capacity_bytes"] == present)
        there = next(point for point in curve if point["capacity_bytes"] > present)
        more = size(there["capacity_bytes"] - present)
        assert view.text(f"#{figure} figcaption") == (
            f"Here you are: {size(present)}, {percent(here['hit_ratio'])} hits. +{more} is there: "
            f"{percent(there['hit_ratio'])} ({100 * (there['hit_ratio'] - here['hit_ratio']):+.1f} points)."
        )
        labels = f"[...document.querySelectorAll('#{figure} text')].map(text => text.getBBox())"
        edge = f"document.querySelector('#{figure} svg').viewBox.baseVal.width"
        assert view.tab.evaluate(f"{labels}.every(box => box.x >= 0 && box.x + box.width <= {edge})")
    # No figure is wider than its tile.
    tiles = "[...document.querySelectorAll('.figures .value')].every(value => value.scrollWidth <= value.clientWidth)"
    for width in WIDTHS:
        view.show(width, "light")
        wait_until(f"every figure fits, {width}", lambda: view.tab.evaluate(tiles), SECONDS)
    assert view.complaints == []
    assert {url.partition("?")[0] for url in view.asked if not url.startswith("data:")} == {
        address(daemon),
        f"{address(daemon)}frame.json",
    }


def test_the_readme_shows_the_page_as_it_is(daemon: Daemon) -> None:
    tool, readme = pictures(), (ROOT / "README.md").read_text()
    source = tool.source(tool.served(daemon.port))
    for theme in THEMES:
        path = tool.picture(theme)
        taken = path.read_bytes()
        assert tool.stamp(taken) == source, f"{path} shows another page; take it again: make pictures"
        assert len(taken) < 200_000, path
        assert str(path.relative_to(ROOT)) in readme
