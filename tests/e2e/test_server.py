"""vLLM as users start it, over HTTP, before and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rig import models
from rig.daemon import Daemon
from rig.engine import EngineConfig, Request
from rig.process import wait_until
from rig.server import Completion, Server
from rig.workload import Workload

CONFIG = EngineConfig(models.LLAMA, block_size=128, max_model_len=8192, max_batched_tokens=8192)
WORKLOAD = Workload(seed=3, prefixes=2, tails=2, prefix_tokens=2100)
SHORT = Request("short", tuple(range(100, 108)), max_tokens=4)
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


def test_a_restarted_server_serves_from_the_pool(tmp_path: Path, start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with Server(CONFIG, tmp_path, daemon.patient_connector(), "before").ready() as server:
        wait_until("the server has slots", lambda: _has_slots(server, daemon), 60)
        before = _complete_all(server)
        assert server.stop() == 0
    with Server(CONFIG, tmp_path, daemon.patient_connector(), "after").ready() as server:
        after = _complete_all(server)
        external_hits = server.metrics()[EXTERNAL_HITS]
        server.stop()
    assert [completion.text for completion in after] == [completion.text for completion in before]
    assert len({completion.text for completion in before}) == len(before), "the prompts do not tell apart"
    assert all(completion.hit_tokens >= 2048 for completion in after), [completion.hit_tokens for completion in after]
    assert before[0].hit_tokens == 0
    assert external_hits >= 2 * 2048
    daemon.wait_for("nothing is held", lambda seen: seen["pinned_bytes"] == 0)


def _has_slots(server: Server, daemon: Daemon) -> bool:
    server.complete(SHORT)  # the first request opens the namespace; a server without requests has no slots for long
    return any(session["reserved_blocks"] for session in daemon.inspect()["sessions"])


def _complete_all(server: Server) -> list[Completion]:
    return [server.complete(request) for request in WORKLOAD.together().requests]
