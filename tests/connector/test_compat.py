"""What the connector takes from the installed vLLM is there, under the names and in the shapes it expects.

Runs against every vLLM that Forebay supports; a name that went away fails here, and not in an engine.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points

import pytest
from fake import FakeDaemon
from forebay import vllm as plugin
from forebay.vllm import compat
from forebay.vllm.connector import ForebayConnector
from forebay.vllm.manager import ForebayManager
from forebay.vllm.spec import ForebaySpec
from forebay.vllm.worker import ForebayWorker
from harness import Engine, Shape, prompt, vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.factory import OffloadingSpecFactory


def test_this_vllm_has_all_that_is_needed() -> None:
    assert compat.missing() == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ForebayConnector, OffloadingConnector),
        (ForebayManager, OffloadingManager),
        (ForebayWorker, OffloadingWorker),
    ],
)
def test_overridden_methods_take_what_vllm_passes(ours: type, theirs: type) -> None:
    overridden = [name for name in vars(ours) if callable(getattr(theirs, name, None)) and not name.startswith("__")]
    assert len(overridden) >= 4
    for name in overridden:
        their_names = list(inspect.signature(getattr(theirs, name)).parameters)
        our_parameters = inspect.signature(getattr(ours, name)).parameters
        takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in our_parameters.values())
        assert takes_any or list(our_parameters)[: len(their_names)] == their_names, name


def test_every_hook_that_could_reach_vllms_half_is_guarded() -> None:
    """Whatever vLLM's connector does with its scheduler or worker half must not run while Forebay is off."""
    reaching = [
        name
        for name, method in vars(OffloadingConnector).items()
        if inspect.isfunction(method)
        and not name.startswith("_")
        and ("connector_scheduler" in inspect.getsource(method) or "connector_worker" in inspect.getsource(method))
    ]
    assert len(reaching) > 15
    behind_others = {"get_finished"}  # called by `get_transfer_results` alone
    assert {name for name in reaching if name not in vars(ForebayConnector)} == behind_others


def test_the_connector_keeps_upstreams_promises() -> None:
    assert supports_hma(ForebayConnector)
    assert not ForebayConnector.requires_kv_delivery.fget(None)  # type: ignore[attr-defined]
    assert issubclass(ForebayConnector, KVConnectorBase_V1)


def test_registering_twice_is_fine() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("ForebayConnector") is ForebayConnector
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "ForebaySpec"}) is ForebaySpec


def test_registering_imports_factories_alone() -> None:
    script = """
import sys
import conftest  # the environment of these tests
from forebay.vllm import register
register()
ours = sorted(name for name in sys.modules if name.startswith("forebay.vllm"))
assert ours == ["forebay.vllm", "forebay.vllm.names"], ours
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=_with_path(), check=False
    )
    assert done.returncode == 0, done.stderr


def test_registering_survives_a_vllm_without_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.factory", None)
    plugin.register()


def test_an_installed_package_is_a_plugin() -> None:
    installed = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "forebay"]
    for entry in installed:  # none where the tests run from the sources
        assert entry.value == "forebay.vllm:register"


def test_the_front_end_needs_nothing_but_the_connectors_name() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()

    config = vllm_config(Shape())
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_connector_extra_config.clear()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = ForebayConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    stats = compat.new_stats()
    stats.observe_histogram("forebay:step_seconds", 0.001)
    stats.increase_counter("forebay:refused_blocks", 3)
    metrics.observe(stats.data)
    assert registry.get_sample_value("forebay:refused_blocks_total", {"engine": "0"}) == 3
    assert registry.get_sample_value("forebay:step_seconds_count", {"engine": "0"}) == 1


def test_every_metric_that_is_counted_is_declared(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(daemon, monkeypatch, Shape(extra={"stock_blocks": 1}))
    engine.generate("a", prompt(1, 100))
    engine.forget()
    engine.workers[0].engine.fail_loads = 1
    engine.generate("b", prompt(1, 100))
    ours = {name for name in engine.stats if name.startswith("forebay:")}
    assert ours <= ForebaySpec.build_metric_definitions({}).keys()
    assert {"forebay:step_seconds", "forebay:is_ready", "forebay:failed_loads", "forebay:refused_blocks"} <= ours


def test_an_engine_of_many_ray_ranks_spans_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(Shape())
    transfer = config.kv_transfer_config
    assert transfer is not None
    transfer.kv_load_failure_policy = "recompute"
    assert compat.unsupported(config, transfer) is None
    monkeypatch.setattr(compat, "_local_devices", lambda: 4)
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", "ray")
    monkeypatch.setattr(config.parallel_config, "world_size", 8)
    assert "spans hosts" in str(compat.unsupported(config, transfer))


def _with_path() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize(
    ("groups", "window", "blocks"), [("hybrid", 50, 4), ("hybrid", 64, 4), ("mixed", 50, 3), ("mixed", 64, 3)]
)
def test_a_window_is_told_as_long_as_a_prefix_that_ends_in_a_block_needs_it(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, groups: str, window: int, blocks: int
) -> None:
    scheduler = Engine(daemon, monkeypatch, Shape(groups=groups, window=window)).connector.scheduler
    assert [shape.window for shape in compat.group_shapes(scheduler, is_replicated=False)] == [None, blocks]


def test_a_draft_model_s_window_is_not_told(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM also asks for the chunk behind the prefix."""
    scheduler = Engine(daemon, monkeypatch, Shape(groups="hybrid")).connector.scheduler
    drafts = tuple(group._replace(is_eagle_group=True) for group in scheduler.config.kv_group_configs)
    monkeypatch.setattr(scheduler, "config", scheduler.config._replace(kv_group_configs=drafts))
    assert [shape.window for shape in compat.group_shapes(scheduler, is_replicated=False)] == [None, 0]
