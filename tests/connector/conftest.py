"""Environment of the connector's tests: vLLM without network or GPU, and Forebay's faults visible."""

from __future__ import annotations

import os

for _name in [name for name in os.environ if name.startswith(("VLLM_", "FOREBAY_")) or name == "PYTHONHASHSEED"]:
    if _name != "FOREBAY_BIN":
        del os.environ[_name]
os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

from collections.abc import Iterator

import pytest
from fake import FakeDaemon


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(autouse=True)
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault stays hidden, except where a test provokes faults (`@pytest.mark.faults`)."""
    if request.node.get_closest_marker("faults") is None:
        monkeypatch.setenv("FOREBAY_STRICT", "1")


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks at a session while a test counts calls, faults or lines; `test_health.py` is about that thread."""
    monkeypatch.setattr("forebay.vllm.health.WATCH_SECONDS", 3600.0)


@pytest.fixture(autouse=True, scope="session")
def loaded_now() -> Iterator[None]:
    """Models of these tests may be made by the process that loads them; `test_loaded.py` is about those that change then.

    For the session, since fixtures of whole modules make models too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.vllm.loaded.began_ns", lambda: 1 << 62)
        yield
