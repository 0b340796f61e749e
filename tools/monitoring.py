#!/usr/bin/env python3
"""Writes `contrib/`: alert rules for Prometheus and a dashboard for Grafana.

`python3 tools/monitoring.py` writes both, `python3 tools/monitoring.py --check` compares them.

Names, labels and descriptions come from docs/metrics.md, which is generated from the code. An expression with a metric
or a label that is not in that page is an error, so no panel shows a metric that does not exist.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
METRICS = ROOT / "docs/metrics.md"
RULES = ROOT / "contrib/prometheus/forebay.rules.yml"
DASHBOARD = ROOT / "contrib/grafana/forebay.json"
SYMPTOMS = "docs/troubleshooting.md"
# Labels that Prometheus adds, and that of a histogram's buckets.
OTHER_LABELS = {"instance", "job", "le"}


@dataclass(frozen=True)
class Metric:
    """A row of docs/metrics.md."""

    name: str
    kind: str
    labels: frozenset[str]
    meaning: str


@dataclass(frozen=True)
class Alert:
    """A rule. `symptom` is a section of docs/troubleshooting.md."""

    name: str
    expr: str
    minutes: int
    severity: str
    summary: str
    symptom: str


@dataclass(frozen=True)
class Panel:
    """A picture. `exprs` are pairs of an expression and its legend."""

    title: str
    unit: str
    exprs: tuple[tuple[str, str], ...]
    note: str = ""
    kind: str = "timeseries"


ALERTS = (
    Alert(
        "ForebayDown",
        'up{job="forebay"} == 0',
        1,
        "critical",
        "No daemon answers on {{ $labels.instance }}. Its engines compute every prompt.",
        "the-daemon-does-not-run",
    ),
    Alert(
        "ForebayRestarts",
        "changes(forebay_start_time_seconds[1h]) > 2",
        0,
        "warning",
        "The daemon on {{ $labels.instance }} started {{ $value }} times within an hour.",
        "the-daemon-does-not-run",
    ),
    Alert(
        "ForebayCorruptBlocks",
        "sum by (instance, found_by) (increase(forebay_corrupt_blocks_total[1h])) > 0",
        0,
        "critical",
        "Blocks on {{ $labels.instance }} had a wrong checksum, found by {{ $labels.found_by }}. None was served where loads are verified.",
        "blocks-are-corrupt",
    ),
    Alert(
        "ForebayTierSick",
        'forebay_tier_state{state=~"sick|failed"} == 1',
        5,
        "warning",
        "The tier {{ $labels.tier }} of {{ $labels.instance }} is {{ $labels.state }}.",
        "a-tier-is-sick",
    ),
    Alert(
        "ForebayDiskUnhealthy",
        "forebay_disk_healthy == 0",
        5,
        "warning",
        "{{ $labels.instance }} does without the disk {{ $labels.disk }} ({{ $labels.direction }}).",
        "a-tier-is-sick",
    ),
    Alert(
        "ForebaySharedStoreUnhealthy",
        "forebay_shared_store_healthy == 0",
        5,
        "warning",
        "{{ $labels.instance }} does without the shared store {{ $labels.store }} ({{ $labels.direction }}).",
        "a-tier-is-sick",
    ),
    Alert(
        "ForebaySharedStoreFull",
        "forebay_shared_store_used_bytes > 0.98 * forebay_shared_store_capacity_bytes > 0",
        30,
        "warning",
        "The shared store {{ $labels.store }} is full, and nothing frees space in it.",
        "a-shared-store-is-full",
    ),
    Alert(
        "ForebayLateLoads",
        "forebay_tier_late_bytes > 0",
        15,
        "warning",
        "Loads from the tier {{ $labels.tier }} of {{ $labels.instance }} do not end. They keep slots of the pool.",
        "a-tier-is-slow",
    ),
    Alert(
        "ForebayUnwrittenBlocks",
        "sum by (instance, tier) (rate(forebay_tier_unwritten_blocks_total[15m]))"
        " > 0.1 * sum by (instance, tier) (rate(forebay_tier_stored_blocks_total[15m])) + 0.1",
        30,
        "warning",
        "The tier {{ $labels.tier }} of {{ $labels.instance }} takes blocks more slowly than engines make them.",
        "a-tier-is-slow",
    ),
    Alert(
        "ForebayPoolPinned",
        "forebay_pool_pinned_bytes > 0.9 * forebay_pool_populated_bytes > 0",
        15,
        "warning",
        "Nearly all of the pool of {{ $labels.instance }} is in use, so little can be evicted.",
        "engines-get-no-slots",
    ),
    Alert(
        "ForebayPoolFenced",
        "forebay_pool_fenced_bytes > 0.05 * forebay_pool_populated_bytes > 0",
        30,
        "warning",
        "Processes on {{ $labels.instance }} keep slots of the pool although their sessions ended.",
        "engines-get-no-slots",
    ),
    Alert(
        "ForebaySlowEvents",
        "histogram_quantile(0.99, sum by (instance, le) (rate(forebay_event_seconds_bucket[5m]))) > 0.01",
        10,
        "warning",
        "The thread that decides takes more than 10 ms for one event in 100.",
        "lookups-are-slow",
    ),
    Alert(
        "ForebayRefusedPeers",
        "increase(forebay_refused_peers_total[15m]) > 0",
        15,
        "warning",
        "A user who may not connect tries to reach the daemon on {{ $labels.instance }}.",
        "an-engine-does-not-connect",
    ),
    Alert(
        "ForebayRefusedClients",
        "sum by (instance, user, limit) (increase(forebay_refused_clients_total[15m])) > 0",
        15,
        "warning",
        "The user {{ $labels.user }} on {{ $labels.instance }} is refused again and again, at {{ $labels.limit }}.",
        "an-engine-does-not-connect",
    ),
    Alert(
        "ForebayErrors",
        "sum by (instance, method, code) (rate(forebay_rpc_errors_total[10m])) > 1",
        15,
        "warning",
        "Calls of {{ $labels.method }} fail on {{ $labels.instance }}: {{ $labels.code }}.",
        "an-engine-does-not-connect",
    ),
    Alert(
        "ForebayHitRate",
        "forebay_alarm == 1",
        30,
        "warning",
        "{{ $labels.instance }}: {{ $labels.name }}.",
        "the-hit-rate-is-low",
    ),
)

SHOWN = 'instance=~"$instance"'


def quantile(share: float, histogram: str, *by: str) -> str:
    """An expression: the time that this share of the operations took at most, over five minutes."""
    labels = ", ".join([*by, "le"])
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{{{SHOWN}}}[5m])))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Is anything wrong?",
        (
            Panel("Daemons that answer", "none", (('sum(up{job="forebay"})', "up"),), "Of all hosts.", "stat"),
            Panel(
                "Tiers that do not serve",
                "none",
                ((f'sum(forebay_tier_state{{{SHOWN},state=~"sick|failed"}})', "sick or failed"),),
                kind="stat",
            ),
            Panel(
                "Disks that do not serve",
                "none",
                ((f"count(forebay_disk_healthy{{{SHOWN}}} == 0) or vector(0)", "disks and directions"),),
                kind="stat",
            ),
            Panel(
                "Shared stores that do not serve",
                "none",
                ((f"count(forebay_shared_store_healthy{{{SHOWN}}} == 0) or vector(0)", "stores and directions"),),
                kind="stat",
            ),
            Panel(
                "Corrupt blocks, one hour",
                "none",
                ((f"sum(increase(forebay_corrupt_blocks_total{{{SHOWN}}}[1h]))", "blocks"),),
                kind="stat",
            ),
            Panel("Alarms", "none", ((f"sum(forebay_alarm{{{SHOWN}}})", "alarms"),), kind="stat"),
            Panel("Engines", "none", ((f"sum(forebay_sessions{{{SHOWN}}})", "sessions"),), kind="stat"),
            Panel(
                "Versions",
                "none",
                ((f"count by (version, revision) (forebay_build_info{{{SHOWN}}})", "{{version}} {{revision}}"),),
                "Daemons of each version and revision.",
                "stat",
            ),
        ),
    ),
    (
        "Is it worth it?",
        (
            Panel(
                "Hit ratio",
                "percentunit",
                (
                    (
                        f"sum(rate(forebay_lookup_hits_total{{{SHOWN}}}[5m])) / sum(rate(forebay_lookup_keys_total{{{SHOWN}}}[5m]))",
                        "hits",
                    ),
                    (f"avg(forebay_ceiling_ratio{{{SHOWN}}})", "a cache without limit"),
                    (
                        f"sum(forebay_sampled_optimum_hits{{{SHOWN}}}) / sum(forebay_sampled_keys{{{SHOWN}}})",
                        "the optimum at this size",
                    ),
                ),
            ),
            Panel(
                "Hits by tier",
                "none",
                ((f"sum by (tier) (rate(forebay_lookup_hits_by_tier_total{{{SHOWN}}}[5m]))", "{{tier}}"),),
                "Keys a second. The first hit of a block that a tier brought up is the tier's, all others the pool's.",
            ),
            Panel(
                "Prompt tokens not computed",
                "none",
                ((f"sum by (instance) (rate(forebay_saved_tokens_total{{{SHOWN}}}[5m]))", "{{instance}}"),),
                "Tokens a second.",
            ),
            Panel(
                "Prefill time saved",
                "s",
                ((f"sum by (instance) (rate(forebay_saved_prefill_seconds_total{{{SHOWN}}}[5m]))", "{{instance}}"),),
                "Seconds of prefill a second: 1 is one engine that computes prompts all the time.",
            ),
        ),
    ),
    (
        "Why not more?",
        (
            Panel(
                "Misses by reason",
                "none",
                ((f"sum by (reason) (rate(forebay_lookup_misses_total{{{SHOWN}}}[5m]))", "{{reason}}"),),
                "Keys a second.",
            ),
            Panel(
                "Hit ratio by size of the pool",
                "percentunit",
                ((f"avg by (capacity_bytes) (forebay_capacity_curve_ratio{{{SHOWN}}})", "{{capacity_bytes}} bytes"),),
                kind="bargauge",
            ),
            Panel(
                "Hit ratio by size of the disk",
                "percentunit",
                ((f"avg by (capacity_bytes) (forebay_disk_curve_ratio{{{SHOWN}}})", "{{capacity_bytes}} bytes"),),
                kind="bargauge",
            ),
            Panel(
                "Evicted blocks",
                "none",
                ((f"sum by (instance) (rate(forebay_evicted_blocks_total{{{SHOWN}}}[5m]))", "{{instance}}"),),
                "Blocks a second.",
            ),
        ),
    ),
    (
        "The pool",
        (
            Panel(
                "Memory",
                "bytes",
                (
                    (f"sum(forebay_pool_capacity_bytes{{{SHOWN}}})", "capacity"),
                    (f"sum(forebay_pool_populated_bytes{{{SHOWN}}})", "populated"),
                    (f"sum(forebay_pool_used_bytes{{{SHOWN}}})", "used"),
                    (f"sum(forebay_pool_pinned_bytes{{{SHOWN}}})", "pinned"),
                    (f"sum(forebay_pool_reserved_bytes{{{SHOWN}}})", "reserved"),
                    (f"sum(forebay_pool_fenced_bytes{{{SHOWN}}})", "fenced"),
                ),
            ),
            Panel(
                "Blocks stored",
                "Bps",
                ((f"sum by (instance) (rate(forebay_stored_bytes_total{{{SHOWN}}}[5m]))", "{{instance}}"),),
            ),
            Panel(
                "Blocks that engines could not store",
                "none",
                ((f"sum by (reason) (rate(forebay_unstored_blocks_total{{{SHOWN}}}[5m]))", "{{reason}}"),),
                "Slots a second.",
            ),
        ),
    ),
    (
        "Tiers",
        (
            Panel(
                "Bytes moved",
                "Bps",
                ((f"sum by (tier, op) (rate(forebay_tier_operation_bytes_total{{{SHOWN}}}[5m]))", "{{tier}} {{op}}"),),
            ),
            Panel(
                "Time of an operation, p99",
                "s",
                ((quantile(0.99, "forebay_tier_operation_seconds", "tier", "op"), "{{tier}} {{op}}"),),
            ),
            Panel(
                "Promotions by outcome",
                "none",
                (
                    (
                        f"sum by (tier, outcome) (rate(forebay_tier_promotions_total{{{SHOWN}}}[5m]))",
                        "{{tier}} {{outcome}}",
                    ),
                ),
                "Blocks a second that came up into the pool, or did not.",
            ),
            Panel(
                "Prefetches",
                "none",
                (
                    (f"sum by (tier) (rate(forebay_tier_prefetches_total{{{SHOWN}}}[5m]))", "{{tier}} started"),
                    (f"sum by (tier) (rate(forebay_tier_prefetch_hits_total{{{SHOWN}}}[5m]))", "{{tier}} asked for"),
                ),
                "Blocks a second. What was started and not asked for took bandwidth for nothing.",
            ),
            Panel(
                "Blocks not written",
                "none",
                (
                    (
                        f"sum by (tier, reason) (rate(forebay_tier_unwritten_blocks_total{{{SHOWN}}}[5m]))",
                        "{{tier}} {{reason}}",
                    ),
                    (f"sum by (tier) (forebay_tier_waiting_blocks{{{SHOWN}}})", "{{tier}} waiting"),
                ),
            ),
            Panel(
                "Breaker opened",
                "none",
                ((f"sum by (tier) (increase(forebay_tier_breaker_opened_total{{{SHOWN}}}[15m]))", "{{tier}}"),),
            ),
            Panel(
                "Disk writes",
                "Bps",
                (
                    (
                        f"sum by (instance, disk) (rate(forebay_disk_written_bytes_total{{{SHOWN}}}[5m]))",
                        "{{instance}} {{disk}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Purges",
        (
            Panel(
                "Namespaces being purged",
                "none",
                ((f"sum by (instance, tier) (forebay_purge_namespaces{{{SHOWN}}})", "{{instance}} {{tier}}"),),
            ),
            Panel(
                "Walked",
                "percentunit",
                (
                    (
                        f"avg by (instance, tier) (forebay_purge_walked_ratio{{{SHOWN}}}) or vector(0)",
                        "{{instance}} {{tier}}",
                    ),
                ),
                "A line without a name means that no purge walks.",
            ),
            Panel(
                "Blocks removed",
                "none",
                (
                    (f"sum by (instance) (rate(forebay_purged_blocks_total{{{SHOWN}}}[5m]))", "{{instance}} pool"),
                    (
                        f"sum by (instance, tier) (rate(forebay_purge_removed_blocks_total{{{SHOWN}}}[5m]))",
                        "{{instance}} {{tier}}",
                    ),
                ),
                "Blocks a second.",
            ),
        ),
    ),
    (
        "Users and their limits",
        (
            Panel(
                "Connections",
                "none",
                ((f"sum by (instance, user) (forebay_connections{{{SHOWN}}})", "{{instance}} user {{user}}"),),
            ),
            Panel(
                "Calls in flight",
                "none",
                ((f"sum by (instance, user) (forebay_calls_in_flight{{{SHOWN}}})", "{{instance}} user {{user}}"),),
            ),
            Panel(
                "Refused at a limit",
                "none",
                (
                    (
                        f"sum by (user, limit) (rate(forebay_refused_clients_total{{{SHOWN}}}[5m])) or vector(0)",
                        "user {{user}}: {{limit}}",
                    ),
                ),
                "Connections, sessions and calls a second. A line without a name means that nobody was refused.",
            ),
        ),
    ),
    (
        "The daemon",
        (
            Panel(
                "Time of a lookup",
                "s",
                (
                    (quantile(0.5, "forebay_lookup_seconds"), "p50"),
                    (quantile(0.99, "forebay_lookup_seconds"), "p99"),
                ),
                "Promotions and verification that the lookup waited for are in it.",
            ),
            Panel(
                "Time of an event, p99",
                "s",
                ((quantile(0.99, "forebay_event_seconds", "instance"), "{{instance}}"),),
            ),
            Panel(
                "Failed calls",
                "none",
                ((f"sum by (method, code) (rate(forebay_rpc_errors_total{{{SHOWN}}}[5m]))", "{{method}} {{code}}"),),
                "Calls a second. No line means that no call has failed.",
            ),
        ),
    ),
)


def metrics() -> dict[str, Metric]:
    """The rows of docs/metrics.md by name."""
    found = {}
    for line in METRICS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `forebay_"):
            continue
        name = cells[0].strip("`")
        labels = frozenset(re.findall(r"`(\w+)`", cells[2]))
        found[name] = Metric(name, cells[1], labels, cells[3].replace("`", ""))
    return found


def used(expr: str, known: dict[str, Metric]) -> list[Metric]:
    """The metrics of an expression. An error if one of them, or one of its labels, is not in docs/metrics.md."""
    found = []
    for name in dict.fromkeys(re.findall(r"\bforebay_\w+", expr)):
        metric = known.get(name) or known.get(name.removesuffix("_bucket"))
        if metric is None or (metric.kind == "histogram") != name.endswith("_bucket"):
            raise SystemExit(f"error: docs/metrics.md has no {name}\nhint: mend the expression {expr}")
        found.append(metric)
    labels = {label for group in re.findall(r"\bby \(([^)]*)\)", expr) for label in group.split(", ")}
    labels |= set(re.findall(r"[{,](\w+)=~?\"", expr))
    allowed = OTHER_LABELS.union(*(metric.labels for metric in found))
    if labels - allowed:
        raise SystemExit(
            f"error: no metric has the labels {sorted(labels - allowed)}\nhint: mend the expression {expr}"
        )
    return found


def rules(known: dict[str, Metric]) -> str:
    """The alert rules, as YAML. A text in double quotes is the same in JSON and in YAML."""
    lines = [
        "# Alerts of Forebay for Prometheus. Written by tools/monitoring.py: change that file.",
        '# The scrape job of the daemons has the name "forebay".',
        "groups:",
        "  - name: forebay",
        "    rules:",
    ]
    for alert in ALERTS:
        used(alert.expr, known)
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.minutes}m",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook: {SYMPTOMS}#{alert.symptom}",
        ]
    return "\n".join(lines) + "\n"


def panel(panel: Panel, known: dict[str, Metric], number: int, place: dict[str, int]) -> dict[str, object]:
    """A panel as Grafana stores it."""
    meanings = [metric.meaning for expr, _ in panel.exprs for metric in used(expr, known)]
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": "\n\n".join(dict.fromkeys([panel.note, *meanings] if panel.note else meanings)),
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "expr": expr,
                "legendFormat": legend,
                "datasource": source,
                "instant": panel.kind != "timeseries",
            }
            for at, (expr, legend) in enumerate(panel.exprs)
        ],
    }


def dashboard(known: dict[str, Metric]) -> str:
    """The dashboard, as JSON for Grafana's import."""
    panels: list[dict[str, object]] = []
    top = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
            }
        )
        is_short = all(entry.kind == "stat" for entry in row)
        height, width = (4, 24 // len(row)) if is_short else (8, 8)
        for at, entry in enumerate(row):
            place = {"h": height, "w": width, "x": at * width % 24, "y": top + 1 + at * width // 24 * height}
            panels.append(panel(entry, known, len(panels) + 1, place))
        top += 1 + -(-len(row) * width // 24) * height
    variables = [
        {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Host",
            "type": "query",
            "query": "label_values(forebay_build_info, instance)",
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    board = {
        "title": "Forebay",
        "uid": "forebay",
        "tags": ["forebay"],
        "schemaVersion": 38,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def expressions() -> list[str]:
    """Those of all panels, for every host."""
    return [expr.replace("$instance", ".*") for _, row in ROWS for entry in row for expr, _ in entry.exprs]


def main() -> None:
    known = metrics()
    files = {RULES: rules(known), DASHBOARD: dashboard(known)}
    if sys.argv[1:] == ["--check"]:
        stale = [
            str(path.relative_to(ROOT)) for path, text in files.items() if not path.exists() or path.read_text() != text
        ]
        if stale:
            raise SystemExit(
                f"error: {', '.join(stale)} differ from tools/monitoring.py\nhint: run tools/monitoring.py"
            )
        return
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
