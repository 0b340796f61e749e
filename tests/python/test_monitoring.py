"""The alert rules and the dashboard of contrib/, on a real Prometheus that scrapes a real daemon under load."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forebay import Client, ForebayError
from harness import hashes
from rig.daemon import Daemon, free_port
from rig.engine import clean_env
from rig.process import Child, wait_until

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/monitoring.py"
RULES = ROOT / "contrib/prometheus/forebay.rules.yml"
SYMPTOMS = ROOT / "docs/troubleshooting.md"
PROMETHEUS = ROOT / ".cache/prometheus/bin"
BLOCK = 4096
PROMPT = 50
PROMPTS = 600


def monitoring() -> ModuleType:
    spec = importlib.util.spec_from_file_location("monitoring", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def programs() -> Path:
    if not (PROMETHEUS / "promtool").exists():
        pytest.skip("cannot run: the system's packages have no Prometheus (tools/test-prometheus.sh)")
    return PROMETHEUS


def test_the_files_are_what_the_metrics_page_makes_of_them() -> None:
    done = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "expr",
    [
        "forebay_unknown_total > 0",
        'forebay_tier_state{disk="a"}',
        "sum by (disk) (forebay_leases)",
        "forebay_event_seconds",
    ],
)
def test_an_expression_with_what_the_daemon_does_not_have_is_refused(expr: str) -> None:
    tool = monitoring()
    with pytest.raises(SystemExit, match="hint: mend the expression"):
        tool.used(expr, tool.metrics())


def test_each_alert_links_to_a_section_that_names_it_or_its_symptom() -> None:
    page = SYMPTOMS.read_text()
    titles = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert {alert.symptom for alert in monitoring().ALERTS} <= anchors


def test_promtool_takes_the_rules_and_their_tests(programs: Path) -> None:
    for command in (["check", "rules", RULES], ["test", "rules", Path(__file__).parent / "forebay.rules.test.yml"]):
        done = subprocess.run([programs / "promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Prometheus:
    """Scrapes one daemon twice a second, and judges the rules as often."""

    port: int
    child: Child

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.loads(reply.read())["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return result

    def firing(self) -> set[str]:
        alerts = self.ask("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def answers(self) -> bool:
        try:
            return bool(self.query("up"))
        except OSError:
            return False


@pytest.fixture
def prometheus(programs: Path, tmp_path: Path, loaded: Daemon) -> Iterator[Prometheus]:
    # The rules as they are, but for the minutes that an alert waits.
    rules = re.sub(r"for: \d+m", "for: 1s", RULES.read_text())
    (tmp_path / "rules.yml").write_text(rules)
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "forebay", "static_configs": [{"targets": [f"127.0.0.1:{loaded.port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    arguments = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    argv = [str(programs / "prometheus"), *arguments, f"--web.listen-address=127.0.0.1:{port}"]
    prometheus = Prometheus(port, Child("prometheus", argv, tmp_path / "prometheus.log", env=clean_env()))
    try:
        wait_until("prometheus answers", prometheus.answers, 60.0)
        yield prometheus
    finally:
        prometheus.child.kill()


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "store").mkdir()
    # No load is late, on a busy machine neither: late ones raise an alert.
    patient_ms = 20_000
    fs = {"directories": [str(tmp_path / "store")], "capacity_bytes": 256 << 20, "load_deadline_ms": patient_ms}
    disk = {"ssd_bytes": 256 << 20, "ssd_admission": "all", "ssd_load_deadline_ms": patient_ms}
    with Daemon(capacity_bytes=64 << 20, tiers={"tier.fs": fs}, **disk) as daemon:
        yield daemon.start()


def traffic(client: Client) -> Callable[[int], None]:
    """More than the pool has room for, so that blocks are evicted, written and promoted."""
    namespace = client.open_namespace({"model": "a"}, {0: BLOCK})

    def run(prompt: int) -> None:
        keys = hashes(f"prompt {prompt % PROMPTS}", PROMPT)
        if prompt < PROMPTS:
            client.put(namespace, 0, [(key, key * (BLOCK // len(key))) for key in keys])
        assert client.get(namespace, 0, keys)

    return run


def test_every_panel_has_data_and_a_killed_daemon_raises_an_alert(prometheus: Prometheus, loaded: Daemon) -> None:
    client = Client(str(loaded.socket.parent), deadline=20.0)
    with pytest.raises(ForebayError):
        client.open_namespace({}, {0: BLOCK})
    run, prompt = traffic(client), 0
    expressions: list[str] = monitoring().expressions()
    empty = list(expressions)

    def is_whole() -> bool:
        nonlocal prompt
        for _ in range(20):
            run(prompt)
            prompt += 1
        empty[:] = [expr for expr in empty if not prometheus.query(expr)]
        return not empty

    try:
        wait_until("every panel has data", is_whole, 120.0)
    except AssertionError:
        raise AssertionError(f"without data: {empty}") from None
    # That events are slow is true on a busy machine; and a scrape that came late is the last word until the next one.
    allowed = {"ForebayHitRate", "ForebayUnwrittenBlocks", "ForebaySlowEvents"}
    wait_until("no other alert fires", lambda: prometheus.firing() <= allowed, 30.0)
    loaded.kill()
    wait_until("the alert fires", lambda: "ForebayDown" in prometheus.firing(), 60.0)
