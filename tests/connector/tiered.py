"""The harness's engine on vLLM's own tiering, with Forebay's pool below it; `rig.host_tier` stands for the GPU."""

from __future__ import annotations

import os
import time
from typing import Any

import harness
import numpy as np
from fake import FakeDaemon, FakeEngine, FakeSession
from forebay.vllm.tier import ForebayTier
from forebay.vllm.tiering import ForebayTieringConnector
from harness import PATIENT, Shape
from rig.host_tier import NAMED
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


class RowEngine(FakeEngine):
    """Rows of the host tier begin at 0, which is no null block there."""

    def _address(self, tensor: int, block: int) -> int:
        address, rows, stride, _ = self._tensors[tensor]
        assert 0 <= block < rows
        return address + block * stride


def use_fakes(daemon: FakeDaemon, monkeypatch: Any) -> None:
    from forebay.vllm import tier

    def open_session(settings: Any, engine_id: str, incarnation: bytes, ranks: int, stock: int) -> FakeSession:
        return FakeSession(daemon, engine_id, ranks, stock)

    def open_engine(
        settings: Any, engine_id: str, incarnation: bytes, rank: int, ranks: int, tensors: Any, groups: Any, chunk: int
    ) -> RowEngine:
        return RowEngine(daemon, engine_id, rank, tensors, groups, chunk)

    monkeypatch.setattr(tier, "open_session", open_session)
    monkeypatch.setattr(tier, "open_engine", open_engine)


class Engine(harness.Engine):
    """The harness's engine on vLLM's tiering. `rows` are chunks of the host tier. `beside` makes a `MultiConnector` of it."""

    # Threads copy here, and steps spin while they wait for a processor.
    max_steps = 10 * harness.MAX_STEPS
    started = 0

    def __init__(
        self,
        monkeypatch: Any,
        daemon: FakeDaemon | None = None,
        rows: int = 64,
        beside: tuple[dict[str, Any], ...] = (),
        **shape: Any,
    ):
        if daemon is not None:
            use_fakes(daemon, monkeypatch)
        Engine.started += 1
        engine_id = f"tier-{os.getpid()}-{Engine.started}"
        top = {"kv_connector": "ForebayTieringConnector"} | shape.pop("top", {})
        chunk = shape.get("extra", {}).get("blocks_per_chunk", 1)
        cpu_bytes = {"cpu_bytes_to_use": rows * chunk * 8192}
        extra = cpu_bytes | NAMED | shape.pop("extra", {})
        if beside:
            ours = top | {"kv_role": "kv_both", "kv_connector_extra_config": PATIENT | extra}
            multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [*beside, ours]}}
            top = multi | shape.pop("around", {})
        super().__init__(daemon or FakeDaemon(), monkeypatch, Shape(engine_id=engine_id, top=top, extra=extra, **shape))

    @property
    def connector(self) -> ForebayTieringConnector:  # type: ignore[override]
        connector: Any = self.scheduler.connector
        if isinstance(connector, MultiConnector):
            connector = connector.sub_connectors[-1]
        assert isinstance(connector, ForebayTieringConnector)
        return connector

    @property
    def tier(self) -> ForebayTier:
        return self.connector.tier

    @property
    def session(self) -> Any:
        return self.tier.manager._session

    @property
    def copies(self) -> Any:
        return self.tier._engine

    def wait_for_stock(self, seconds: float = 20.0) -> None:
        """Steps until slots are at hand: chunks that find none are not stored."""
        deadline = time.monotonic() + seconds
        while self.session.stats().get("reserved_stock", 0) < 32:
            self.session.reserve(0, 0)  # a session of which nothing is asked has no stock for long
            assert time.monotonic() < deadline, self.session.stats()
            self.connector.scheduler.manager.has_pending_work()  # type: ignore[union-attr]
            self._step_and_pause()

    def settle(self, seconds: float = 20.0) -> None:
        """Steps until the pool has all that it will get."""
        deadline = time.monotonic() + seconds
        manager = self.connector.scheduler.manager
        while manager.has_pending_work() or self.session.stats().get("queued", 0):  # type: ignore[union-attr]
            assert time.monotonic() < deadline, self.session.stats()
            self._step_and_pause()

    def _step_and_pause(self) -> None:
        """Leaves the processor to the daemon, which the steps of an idle engine would keep from it."""
        self.step()
        time.sleep(0.005)

    def forget_rows(self) -> None:
        """Empties vLLM's host tier and the engine's own cache: only the pool can hit now."""
        self.forget()
        manager: Any = self.connector.scheduler.manager
        # vLLM's own reset drains the jobs of its tiers first, since they know rows by their chunks.
        deadline = time.monotonic() + 20.0
        while manager._jobs:
            assert time.monotonic() < deadline, manager._jobs
            self.step()
        manager.primary_tier.reset_cache()
        np.asarray(self.tier._primary_kv_view).fill(0x33)

    def stop(self) -> None:
        self.scheduler.connector.shutdown()  # type: ignore[union-attr]
        for worker in self.workers:
            worker.connector.shutdown()

    def assert_nothing_is_held(self) -> None:
        manager = self.tier.manager
        assert not (manager._requests or manager._leased or manager._promoting or manager._loads or manager._jobs)
        assert len(manager._stores) == 0 and not manager._waiting
        assert not (self.tier._requests or self.tier._copying or self.tier._loads or self.tier._loaded)
        assert self.daemon.leased == 0 and self.daemon.reserved == 0

    def assert_no_faults(self) -> None:
        assert self.tier.breaker.faults == 0 and not self.tier.breaker.is_off
