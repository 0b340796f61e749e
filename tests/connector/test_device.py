"""A worker whose tensors are a GPU's, from vLLM's calls down to the real daemon, on the fake driver under libcuda's names.

Holds true: the fake is loaded by its path into this process alone, and is what the native module then finds as
`libcuda.so.1`. The "model" writes on a stream that runs late; what a block holds is read here, without Forebay's help.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forebay import Client, EngineSession, Ticket
from forebay.vllm.session import AbsentEngine
from forebay.vllm.settings import Settings
from forebay.vllm.slots import PoolSlots
from forebay.vllm.worker import ForebayWorker
from rig.daemon import Daemon
from rig.paths import CHECKOUT
from rig.process import wait_until
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

SECONDS = 30.0
ROWS = 16
PAGES = (3000, 1000)
# The same in words of 16 bytes, which the kernel takes.
WORDS = (3008, 992)
STRIDE = 4096
INCARNATION = bytes(range(1, 17))


class Driver:
    """The fake driver of this process."""

    def __init__(self) -> None:
        subprocess.run(
            ["cargo", "build", "--quiet", "--locked", "--package", "forebay-fake-cuda"], cwd=CHECKOUT, check=True
        )
        self._lib = ctypes.CDLL(str(CHECKOUT / "target" / "debug" / "libfake_cuda.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("fake_tensor", "fake_stream", "fake_open", "fake_launches"):
            getattr(self._lib, name).restype = ctypes.c_uint64

    def tensor(self, ordinal: int, size: int) -> int:
        return int(self._lib.fake_tensor(ordinal, ctypes.c_uint64(size)))

    def free(self, address: int) -> None:
        self._lib.fake_free(ctypes.c_uint64(address))

    def stream(self, ordinal: int) -> int:
        return int(self._lib.fake_stream(ordinal))

    def compute(self, stream: int, address: int, content: bytes) -> None:
        self._lib.fake_compute(
            ctypes.c_uint64(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint64(0),
            content,
            ctypes.c_uint64(len(content)),
        )

    def turn(self, count: int) -> None:
        self._lib.fake_turn(count)

    def hold(self, stream: int, is_held: bool) -> None:
        self._lib.fake_hold(ctypes.c_uint64(stream), is_held)

    def be(self, version: int) -> None:
        self._lib.fake_version(version)

    def fail(self, fault: str) -> None:
        getattr(self._lib, f"fake_{fault}")()

    def heal(self) -> None:
        self._lib.fake_heal()

    def open(self) -> int:
        return int(self._lib.fake_open())

    def launches(self) -> int:
        return int(self._lib.fake_launches())


@pytest.fixture(scope="module")
def loaded() -> Driver:
    return Driver()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the measurement of the methods is kept, so that only the first worker of a driver makes it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def driver(loaded: Driver, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    yield loaded
    loaded.heal()
    loaded.be(13000)


@dataclass
class FakeTensor:
    """As much of a CUDA tensor as the worker looks at."""

    address: int
    device: torch.device

    shape = (ROWS, STRIDE)

    def data_ptr(self) -> int:
        return self.address

    def stride(self, _: int) -> int:
        return STRIDE

    def element_size(self) -> int:
        return 1


class Gpu:
    """An engine of one rank on a device: its tensors, its stream, both halves of Forebay."""

    def __init__(self, driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, **options: Any):
        self.driver = driver
        self.device = torch.device("cuda", options.pop("ordinal", 1))
        self.pages = options.pop("pages", PAGES)
        self.stream = driver.stream(self.device.index)
        self.tensors = [FakeTensor(driver.tensor(self.device.index, ROWS * STRIDE), self.device) for _ in self.pages]
        self.before = driver.open()
        # What torch answers on a GPU.
        current = SimpleNamespace(cuda_stream=self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current if device == self.device else None)
        socket = str(daemon.socket.parent)
        spec = SimpleNamespace(
            config=SimpleNamespace(
                groups=[SimpleNamespace(group_id=0)],
                engine_id="gpu",
                parallel=SimpleNamespace(rank=0, world_size=1),
            ),
            settings=Settings(**{"socket": socket, "gpu_copies": True} | options.pop("settings", {})),
            incarnation=INCARNATION,
            may_sleep=options.pop("may_sleep", False),
            replicated_layout=False,
            blocks_per_chunk=1,
        )
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(self.tensors, self.pages, strict=True)],  # type: ignore[arg-type]
            [[CanonicalKVCacheRef(number, page) for number, page in enumerate(self.pages)]],
        )
        self.worker = ForebayWorker.open(spec, self.caches)  # type: ignore[arg-type]
        self.session = EngineSession(socket, "gpu", 1, incarnation=INCARNATION, stock_blocks=16, deadline=SECONDS)
        self.session.set_namespace({"model": "gpu", "test": "device"}, [(0, "full", 16, False)])
        self.jobs = 0

    @property
    def engine(self) -> Any:
        return self.worker._engine

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            return self.session.state() == "ready" and self.engine.state() == "ready"

        wait_until("the engine is ready", is_ready, SECONDS)

    def wait_registered(self) -> None:
        def is_registered() -> bool:
            report = self.engine.report()
            return bool(report["registered_bytes"] == report["pool_bytes"] > 0)

        wait_until("the pool is registered", is_registered, SECONDS)

    def compute(self, block: int, content: bytes) -> None:
        at = 0
        for tensor, page in zip(self.tensors, self.pages, strict=True):
            self.driver.compute(self.stream, tensor.address + block * STRIDE, content[at : at + page])
            at += page

    def block(self, block: int) -> bytes:
        return b"".join(
            ctypes.string_at(tensor.address + block * STRIDE, page)
            for tensor, page in zip(self.tensors, self.pages, strict=True)
        )

    def overwrite(self, block: int) -> None:
        for tensor in self.tensors:
            ctypes.memset(tensor.address + block * STRIDE, 0x66, STRIDE)

    def store(self, blocks: list[int]) -> tuple[int, bytes, bytes]:
        slots, generations = b"", b""

        def has_all() -> bool:
            nonlocal slots, generations
            more = self.session.reserve(0, len(blocks) - len(slots) // 4)
            slots, generations = slots + more[0], generations + more[1]
            return len(slots) == 4 * len(blocks)

        wait_until("slots are reserved", has_all, SECONDS)
        self.jobs += 1
        pool = PoolSlots(self.jobs, "request", self.session.pool, ((0, slots, generations),))
        assert self.worker.submit_store(self.jobs, _spec(blocks), pool)
        return self.jobs, slots, generations

    def load(self, ticket: Ticket, blocks: list[int]) -> int:
        self.jobs += 1
        pool = PoolSlots(self.jobs, f"load-{self.jobs}", ticket.pool, ((0, ticket.slots(0), ticket.generations(0)),))
        assert self.worker.submit_load(self.jobs, pool, _spec(blocks))
        return self.jobs

    def finish(self, job: int) -> int:
        """Steps until vLLM has the job's result; its bytes."""
        sizes: list[int] = []

        def is_reported() -> bool:
            results = self.worker.get_finished()
            assert all(result.success for result in results), "vLLM asserts that"
            sizes.extend(result.transfer_size or 0 for result in results if result.job_id == job)
            return bool(sizes)

        wait_until(f"job {job} is reported", is_reported, SECONDS)
        assert len(sizes) == 1
        return sizes[0]

    def hit(self, keys: list[bytes]) -> Ticket:
        ticket = self.session.lookup([(0, keys)])
        assert ticket.poll(SECONDS)
        assert ticket.states(0) == b"\1" * len(keys)
        return ticket

    def close(self) -> None:
        self.worker.shutdown()
        self.session.close()


def _spec(blocks: list[int]) -> GPULoadStoreSpec:
    spec = GPULoadStoreSpec(blocks, [len(blocks)], [0])
    assert spec.block_ids.dtype == np.dtype("int32")
    return spec


def _keys(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(capacity_bytes=64 << 20) as daemon:
        yield daemon.start()


def there_and_back(gpu: Gpu, seed: int = 1) -> None:
    """The model computes blocks that are stored, overwritten after the flush, and loaded into zeroed ones."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    gpu.wait_ready()
    contents = [draw.randbytes(sum(PAGES)) for _ in range(4)]
    for block, content in enumerate(contents):
        gpu.compute(block, content)
    job, slots, generations = gpu.store([0, 1, 2, 3])
    gpu.driver.turn(draw.randrange(20))
    gpu.worker.wait({job, 999})
    for block in range(4):
        assert gpu.block(block) == contents[block], "the model's own work was not done"
        gpu.overwrite(block)
    assert gpu.finish(job) == 4 * sum(PAGES)
    keys = _keys(4)
    gpu.session.commit(0, keys, None, slots, generations)
    wait_until("the commit is acknowledged", lambda: gpu.session.stats()["queued"] == 0, SECONDS)
    assert gpu.session.stats()["stored"] == 4
    ticket = gpu.hit(keys)
    for block in (9, 4, 12, 7):
        gpu.compute(block, b"\0" * sum(PAGES))
    assert gpu.finish(gpu.load(ticket, [9, 4, 12, 7])) == 4 * sum(PAGES)
    assert [gpu.block(block) for block in (9, 4, 12, 7)] == contents
    assert not gpu.worker.take_failed_loads()


@pytest.mark.parametrize(
    ("version", "methods"),
    [
        (13000, ["batch", "loop", "pitched", "kernel"]),
        (12080, ["batch", "loop", "pitched", "kernel"]),
        (12040, ["loop", "pitched", "kernel"]),
    ],
)
def test_what_a_gpu_computes_comes_back_through_the_pool(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, version: int, methods: list[str]
) -> None:
    driver.be(version)
    gpu = Gpu(driver, daemon, monkeypatch)
    there_and_back(gpu)
    report = gpu.engine.report()
    assert report["methods"] == methods and report["trouble"] is None
    assert report["copied_bytes"] == 8 * sum(PAGES)
    assert f"CUDA {version // 1000}.{version % 1000 // 10}" in report["device"]
    gpu.wait_registered()
    gpu.close()
    wait_until("nothing is left open", lambda: driver.open() == gpu.before, SECONDS)


def test_a_block_whose_layers_lie_side_by_side_is_one_page(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(driver, daemon, monkeypatch, pages=(sum(PAGES),))
    there_and_back(gpu)
    assert gpu.engine.report()["trouble"] is None
    gpu.close()


def test_a_pool_that_grows_keeps_its_registration_and_the_engine_goes_on(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(driver, daemon, monkeypatch)
    there_and_back(gpu)
    gpu.wait_registered()
    before = gpu.engine.report()
    assert before["registered_bytes"] == 64 << 20
    daemon.kill()
    daemon.capacity_bytes = 256 << 20
    daemon.start()
    least = before["registered_bytes"]

    def has_grown() -> bool:
        nonlocal least
        report = gpu.engine.report()
        least = min(least, report["registered_bytes"])
        return bool(report["registered_bytes"] == 256 << 20)

    wait_until("all of the larger pool is registered", has_grown, SECONDS)
    assert least == 64 << 20, "registered memory was given back"
    gpu.wait_ready()
    staged = gpu.engine.report()["staged_bytes"]
    ticket = gpu.session.lookup([(0, _keys(4))])
    assert ticket.poll(SECONDS)
    # A daemon that was killed compares what it finds with its checksums first.
    wait_until("the blocks are verified", lambda: ticket.states(0) == b"\1" * 4, SECONDS)
    contents = [gpu.block(block) for block in (9, 4, 12, 7)]
    for block in (1, 2, 3, 5):
        gpu.compute(block, b"\0" * sum(PAGES))
    assert gpu.finish(gpu.load(ticket, [1, 2, 3, 5])) == 4 * sum(PAGES)
    assert [gpu.block(block) for block in (1, 2, 3, 5)] == contents
    assert gpu.engine.report()["staged_bytes"] == staged
    gpu.close()
    wait_until("nothing is left open", lambda: driver.open() == gpu.before, SECONDS)


def test_the_kernel_loads_what_is_in_words_once_it_is_asked_for(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"gpu_method": "kernel", "gpu_multiprocessors": 2}
    gpu = Gpu(driver, daemon, monkeypatch, pages=WORDS, settings=settings)
    gpu.wait_registered()
    tested = driver.launches()
    there_and_back(gpu)
    report = gpu.engine.report()
    assert report["methods"] == ["kernel", "batch", "loop"] and report["trouble"] is None
    assert driver.launches() == tested + 1, "one load, one launch"
    gpu.close()
    wait_until("nothing is left open", lambda: driver.open() == gpu.before, SECONDS)


def test_the_daemon_knows_how_much_of_the_pool_the_driver_has_registered(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(driver, daemon, monkeypatch)
    client = Client(str(daemon.socket.parent))

    def registered() -> Any:
        return [
            session["registered_bytes"] for session in client.inspect()["sessions"] if session["engine_id"] == "gpu"
        ]

    gpu.wait_ready()
    gpu.wait_registered()
    wait_until("the daemon knows it", lambda: registered() == [64 << 20], SECONDS)
    gpu.close()
    wait_until("it is forgotten with the worker", lambda: registered() in ([], [None]), SECONDS)
    driver.fail("refuse_registrations")
    gpu = Gpu(driver, daemon, monkeypatch)
    wait_until("none is registered", lambda: registered() == [0], SECONDS)
    gpu.close()
    client.close()


def test_a_pool_that_the_driver_does_not_register_is_served_and_the_reason_is_logged_once(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.fail("refuse_registrations")
    with caplog.at_level(logging.WARNING, "vllm.forebay"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        gpu = Gpu(driver, daemon, monkeypatch)
        there_and_back(gpu)
        told = [record.getMessage() for record in caplog.records if "staging memory" in record.getMessage()]
    assert len(told) == 1 and "does not register" in told[0]
    report = gpu.engine.report()
    assert report["registered_bytes"] == 0 and report["staged_bytes"] == report["copied_bytes"] > 0
    gpu.close()


def test_the_loss_of_a_device_is_logged_also_after_another_trouble(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.fail("refuse_registrations")
    with caplog.at_level(logging.WARNING, "vllm.forebay"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        gpu = Gpu(driver, daemon, monkeypatch)
        there_and_back(gpu)
        driver.fail("lose")
        for block in (0, 1):
            job, _, _ = gpu.store([block])
            assert gpu.finish(job) == 0
        told = [record.getMessage() for record in caplog.records if "slowly or not at all" in record.getMessage()]
    assert len(told) == 2 and "staging memory" in told[0] and "context has ended" in told[1]
    gpu.close()


def test_an_engine_that_may_sleep_is_never_staged(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.fail("refuse_registrations")
    gpu = Gpu(driver, daemon, monkeypatch, may_sleep=True)
    gpu.wait_ready()
    job, _, _ = gpu.store([0])
    assert gpu.finish(job) == 0
    assert gpu.engine.report()["staged_bytes"] == 0
    gpu.close()


def test_a_device_that_is_lost_fails_loads_and_the_engine_goes_on(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(driver, daemon, monkeypatch)
    there_and_back(gpu)
    ticket = gpu.hit(_keys(2))
    driver.hold(gpu.stream, True)
    gpu.compute(5, b"\0" * sum(PAGES))
    job = gpu.load(ticket, [5, 6])
    driver.fail("lose")
    gpu.worker.wait({job})
    assert gpu.finish(job) == 0
    assert gpu.worker.take_failed_loads() == {f"load-{job}"}
    again = gpu.load(ticket, [5, 6])
    assert gpu.finish(again) == 0
    assert gpu.worker.take_failed_loads() == {f"load-{again}"}
    gpu.close()


def test_without_the_option_nothing_is_copied_and_the_log_says_what_to_do(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm.forebay"):
        gpu = Gpu(driver, daemon, monkeypatch, settings={"gpu_copies": False})
    assert isinstance(gpu.engine, AbsentEngine)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "never run on a GPU" in warning and "gpu_copies" in warning and "ForebayTieringConnector" in warning
    assert driver.open() == gpu.before
    gpu.session.close()


def test_a_model_without_kv_is_told_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    spec = SimpleNamespace(
        config=SimpleNamespace(groups=[]),
        settings=Settings(),
        incarnation=INCARNATION,
        may_sleep=False,
        replicated_layout=False,
        blocks_per_chunk=1,
    )
    with caplog.at_level(logging.WARNING, "vllm.forebay"):
        worker = ForebayWorker.open(spec, CanonicalKVCaches([], []))  # type: ignore[arg-type]
    assert isinstance(worker._engine, AbsentEngine)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "cannot copy from no tensors" in warning


@pytest.mark.parametrize("fault", ["lose", "elsewhere"])
def test_a_device_that_fails_its_test_is_not_used_and_the_log_says_why(
    driver: Driver, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    if fault == "elsewhere":
        tensor = driver.tensor
        monkeypatch.setattr(driver, "tensor", lambda ordinal, size: tensor(1 - ordinal, size))
    stream = driver.stream(0)
    assert stream
    monkeypatch.setattr(driver, "stream", lambda _: stream)
    if fault == "lose":
        allocated = [driver.tensor(1, ROWS * STRIDE) for _ in PAGES]
        monkeypatch.setattr(driver, "tensor", lambda *_: allocated.pop())
        driver.fail("lose")
    with caplog.at_level(logging.WARNING, "vllm.forebay"):
        gpu = Gpu(driver, daemon, monkeypatch)
    assert isinstance(gpu.engine, AbsentEngine)
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "cannot copy in this worker" in error
    assert ("fake error 700" if fault == "lose" else "not on the device") in error
    gpu.session.close()


def test_without_a_driver_the_error_says_so() -> None:
    """In a process of its own: in this one the fake is what is found."""
    script = """
import forebay
try:
    forebay.WorkerEngine("/nowhere", "engine", 0, 1, incarnation=bytes(range(1, 17)), tensors=[(4096, 1, 4096, 4096)],
                         groups=[(0, False, [(0, 4096)])], device=0)
except forebay.ForebayError as error:
    print(error.kind, error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], check=False, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    # Where there is a driver, it does not know this tensor.
    assert ran.stdout.startswith("unsupported there is no `libcuda.so.1`") or "device" in ran.stdout, ran.stdout
