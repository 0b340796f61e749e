"""One peer of `forebay bench transfer --peers`: `python bench/transfer_peer.py nixl`, `mooncake` or `ucx`.

The command starts this program, which starts itself once more as the side that serves. Both have memory of the same
size; the first half is what reads use, the second what writes use. For each line on standard input it answers one on
standard output, both JSON: first `{"bytes": ...}`, then shapes of runs. A run keeps `depth` operations under way, each
of `segments` segments, and ends early after `most_seconds`. What belongs to an operation is prepared before the clock
starts, where the engine can do so. All bytes that moved are compared with the pattern afterwards. CPU time is that of
all threads of both processes. An engine that is not installed is an answer; other trouble is a traceback.

All engines go over TCP on loopback. A variable of the environment that an engine reads is left as it is.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import importlib.metadata
import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

# Offset, which is the same on both sides, and bytes.
Segment = tuple[int, int]
# Completions have to be polled. Without end, that takes a core from the threads that move the bytes; asleep, it comes
# late. On two busy cores both NIXL and Mooncake were fastest with so much of each.
SPIN_S, SLEEP_S = 1e-4, 1e-5
PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """The engine is not installed."""


class Engine(Protocol):
    """One side. The serving side needs `offer` and `serve`, the measuring side the rest."""

    version: str

    def offer(self) -> str: ...
    def serve(self) -> None:
        """Makes progress until standard input has a line or ends."""

    def connect(self, offer: str) -> None: ...
    def prepare(self, verb: str, operations: list[list[Segment]]) -> None: ...
    def begin(self, slot: int) -> None: ...
    def is_done(self, slot: int) -> bool: ...
    def forget(self) -> None:
        """Frees what was prepared."""


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(str(error)) from error


class Nixl:
    """NIXL over its UCX backend. A thread of its own serves; who measures polls, and is faster without one."""

    def __init__(self, name: str, address: int, length: int) -> None:
        os.environ.setdefault("UCX_TLS", "tcp")
        api = imported("nixl._api")
        self.version = f"nixl {importlib.metadata.version('nixl')}"
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=name == "serves"))
        self.agent.register_memory([(address, length, 0, "")], "DRAM")
        self.address = address
        self.handles: list[Any] = []

    def offer(self) -> str:
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return json.dumps({"metadata": metadata, "address": self.address})

    def serve(self) -> None:
        select.select([sys.stdin], [], [])

    def connect(self, offer: str) -> None:
        there = json.loads(offer)
        self.peer = self.agent.add_remote_agent(base64.b64decode(there["metadata"]))
        self.remote = there["address"]

    def prepare(self, verb: str, operations: list[list[Segment]]) -> None:
        for segments in operations:
            here = self.agent.get_xfer_descs([(self.address + at, count, 0) for at, count in segments], "DRAM")
            there = self.agent.get_xfer_descs([(self.remote + at, count, 0) for at, count in segments], "DRAM")
            self.handles.append(self.agent.initialize_xfer(verb.upper(), here, there, self.peer))

    def begin(self, slot: int) -> None:
        self.agent.transfer(self.handles[slot])

    def is_done(self, slot: int) -> bool:
        state: str = self.agent.check_xfer_state(self.handles[slot])
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"a transfer ended as {state}")
        return state == "DONE"

    def forget(self) -> None:
        for handle in self.handles:
            self.agent.release_xfer_handle(handle)
        self.handles = []


class Mooncake:
    """Mooncake's TransferEngine over TCP. Each side has a thread that moves bytes."""

    def __init__(self, _name: str, address: int, length: int) -> None:
        engine = imported("mooncake.engine")
        self.version = f"mooncake {importlib.metadata.version('mooncake-transfer-engine-non-cuda')}"
        self.engine = engine.TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the engine does not start")
        if self.engine.register_memory(address, length) != 0:
            raise RuntimeError("the engine does not take the memory")
        self.address = address
        self.batches: dict[int, int] = {}

    def offer(self) -> str:
        return json.dumps({"name": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.address})

    def serve(self) -> None:
        select.select([sys.stdin], [], [])

    def connect(self, offer: str) -> None:
        there = json.loads(offer)
        self.peer, self.remote = there["name"], there["address"]

    def prepare(self, verb: str, operations: list[list[Segment]]) -> None:
        is_read = verb == "read"
        self.submit = self.engine.batch_transfer_async_read if is_read else self.engine.batch_transfer_async_write
        self.lists = [
            (
                [self.address + at for at, _ in segments],
                [self.remote + at for at, _ in segments],
                [count for _, count in segments],
            )
            for segments in operations
        ]

    def begin(self, slot: int) -> None:
        self.batches[slot] = self.submit(self.peer, *self.lists[slot])
        if self.batches[slot] == 0:
            raise RuntimeError("the engine takes no transfer")

    def is_done(self, slot: int) -> bool:
        status: int = self.engine.transfer_check_status(self.batches[slot])
        if status < 0:
            raise RuntimeError(f"a transfer ended with status {status}")
        return status == 1

    def forget(self) -> None:
        self.lists, self.batches = [], {}


class UcpParams(ctypes.Structure):
    # The first of its fields; the mask says that no other is read.
    _fields_ = [("field_mask", ctypes.c_uint64), ("features", ctypes.c_uint64)]


class UcpWorkerParams(ctypes.Structure):
    _fields_ = [("field_mask", ctypes.c_uint64), ("thread_mode", ctypes.c_int)]


class UcpEpParams(ctypes.Structure):
    _fields_ = [("field_mask", ctypes.c_uint64), ("address", ctypes.c_char_p)]


class UcpMemMapParams(ctypes.Structure):
    _fields_ = [("field_mask", ctypes.c_uint64), ("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class UcpRequestParam(ctypes.Structure):
    _fields_ = [("op_attr_mask", ctypes.c_uint32)]


UCP_FEATURES = 1 << 1 | 1 << 4  # RMA and wake-up


class Ucx:
    """UCX's one-sided calls, without anything between. Both sides sleep while nothing happens."""

    def __init__(self, _name: str, address: int, length: int) -> None:
        os.environ.setdefault("UCX_TLS", "tcp")
        try:
            self.ucp: Any = ctypes.CDLL("libucp.so.0")
        except OSError as error:
            raise Missing(str(error)) from error
        for name in ("ucp_get_nbx", "ucp_put_nbx", "ucp_ep_flush_nbx"):
            getattr(self.ucp, name).restype = ctypes.c_ssize_t
        self.ucp.ucp_get_version_string.restype = ctypes.c_char_p
        self.version = f"ucx {self.ucp.ucp_get_version_string().decode()}"
        context, worker = ctypes.c_void_p(), ctypes.c_void_p()
        # As of the headers of 1.13, which later libraries know.
        features = UcpParams(1, UCP_FEATURES)
        self.check(self.ucp.ucp_init_version(1, 13, ctypes.byref(features), None, ctypes.byref(context)))
        made = self.ucp.ucp_worker_create(context, ctypes.byref(UcpWorkerParams(1, 0)), ctypes.byref(worker))
        self.check(made)
        self.worker, self.handle, descriptor = worker, ctypes.c_void_p(), ctypes.c_int()
        memory = UcpMemMapParams(3, address, length)
        self.check(self.ucp.ucp_mem_map(context, ctypes.byref(memory), ctypes.byref(self.handle)))
        self.check(self.ucp.ucp_worker_get_efd(worker, ctypes.byref(descriptor)))
        self.context, self.address, self.event = context, address, descriptor.value
        self.requests: dict[int, list[int]] = {}

    @staticmethod
    def check(status: int) -> None:
        if status != 0:
            raise RuntimeError(f"a call ended with status {status}")

    def offer(self) -> str:
        def taken(call: Any, *arguments: Any) -> str:
            place, length = ctypes.c_void_p(), ctypes.c_size_t()
            self.check(call(*arguments, ctypes.byref(place), ctypes.byref(length)))
            return ctypes.string_at(place.value or 0, length.value).hex()

        worker = taken(self.ucp.ucp_worker_get_address, self.worker)
        key = taken(self.ucp.ucp_rkey_pack, self.context, self.handle)
        return json.dumps({"worker": worker, "key": key, "address": self.address})

    def sleep(self, *others: TextIO) -> bool:
        """Until something happens here, or one of the others can be read; whether one can."""
        while self.ucp.ucp_worker_progress(self.worker):
            pass
        # Otherwise something happened meanwhile.
        if self.ucp.ucp_worker_arm(self.worker) != 0:
            return False
        return any(other in select.select([self.event, *others], [], [])[0] for other in others)

    def serve(self) -> None:
        while not self.sleep(sys.stdin):
            pass

    def connect(self, offer: str) -> None:
        there = json.loads(offer)
        self.remote, self.peer, self.key = there["address"], ctypes.c_void_p(), ctypes.c_void_p()
        where = UcpEpParams(1, bytes.fromhex(there["worker"]))
        self.check(self.ucp.ucp_ep_create(self.worker, ctypes.byref(where), ctypes.byref(self.peer)))
        self.check(self.ucp.ucp_ep_rkey_unpack(self.peer, bytes.fromhex(there["key"]), ctypes.byref(self.key)))

    def prepare(self, verb: str, operations: list[list[Segment]]) -> None:
        self.call = self.ucp.ucp_get_nbx if verb == "read" else self.ucp.ucp_put_nbx
        self.is_write, self.nothing = verb == "write", ctypes.byref(UcpRequestParam(0))
        self.segments = [
            [
                (ctypes.c_void_p(self.address + at), ctypes.c_size_t(count), ctypes.c_uint64(self.remote + at))
                for at, count in segments
            ]
            for segments in operations
        ]

    def begin(self, slot: int) -> None:
        requests = []
        for here, count, there in self.segments[slot]:
            requests.append(self.call(self.peer, here, count, there, self.key, self.nothing))
        if self.is_write:
            # A put ends when its memory may be used again; the flush, when the peer has the bytes.
            requests.append(self.ucp.ucp_ep_flush_nbx(self.peer, self.nothing))
        if any(-100 < request < 0 for request in requests):
            raise RuntimeError(f"a call ended with status {min(requests)}")
        self.requests[slot] = [request for request in requests if request != 0]

    def is_done(self, slot: int) -> bool:
        left = self.requests[slot]
        while left:
            status = self.ucp.ucp_request_check_status(ctypes.c_void_p(left[-1]))
            if status == 1:
                self.ucp.ucp_worker_progress(self.worker)
                return False
            self.check(status)
            self.ucp.ucp_request_free(ctypes.c_void_p(left.pop()))
        return True

    def forget(self) -> None:
        self.segments, self.requests = [], {}


ENGINES: dict[str, Callable[[str, int, int], Engine]] = {"nixl": Nixl, "mooncake": Mooncake, "ucx": Ucx}


class Memory:
    def __init__(self, length: int) -> None:
        self.bytes = mmap.mmap(-1, length)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.length = length

    def fill(self, start: int, count: int, seed: int | None) -> None:
        self.bytes[start : start + count] = bytes(count) if seed is None else random.Random(seed).randbytes(count)

    def wrong_bytes(self, start: int, count: int, seed: int) -> int:
        found, expected = self.bytes[start : start + count], random.Random(seed).randbytes(count)
        return 0 if found == expected else sum(a != b for a, b in zip(found, expected, strict=True))


def serve(name: str, length: int, answers: TextIO) -> None:
    """The other side: does what it is told, and lets its engine work meanwhile."""
    memory = Memory(length)
    engine = ENGINES[name]("serves", memory.address, length)
    tell(answers, {"offer": engine.offer()})
    while True:
        engine.serve()
        line = sys.stdin.readline()
        if not line:
            return
        ask = json.loads(line)
        answer: dict[str, Any] = {"cpu_s": time.process_time()}
        if ask["do"] == "fill":
            memory.fill(0, ask["count"], ask["seed"] if ask["verb"] == "read" else None)
        elif ask["do"] == "compare":
            answer["wrong_bytes"] = memory.wrong_bytes(0, ask["count"], ask["seed"])
        tell(answers, answer)


def tell(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


class Other:
    """The serving side, as a process of its own that ends with this one's pipe."""

    def __init__(self, name: str, length: int) -> None:
        command = [sys.executable, __file__, name, str(length)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.said()

    def said(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the serving side has ended")
        found: dict[str, Any] = json.loads(line)
        return found


def measured(engine: Engine, other: Other, memory: Memory, shape: dict[str, Any]) -> dict[str, Any]:
    size, segments, depth, count = (shape[name] for name in ("size_bytes", "segments", "depth", "operations"))
    verb, seed, half = shape["verb"], shape["seed"], size * segments * depth
    memory.fill(0, half, seed if verb == "write" else None)
    other.ask(do="fill", count=half, seed=seed, verb=verb)
    # Backwards, so that no two segments follow each other.
    slots = [[((slot * segments + at) * size, size) for at in reversed(range(segments))] for slot in range(depth)]
    engine.prepare(verb, slots)
    before = time.process_time() + other.ask(do="wait")["cpu_s"]
    seconds, latencies = run(engine, depth, count, shape["most_seconds"])
    cpu = time.process_time() + other.ask(do="wait")["cpu_s"] - before
    engine.forget()
    ask = {"do": "compare", "count": half, "seed": seed}
    wrong = memory.wrong_bytes(0, half, seed) if verb == "read" else other.ask(**ask)["wrong_bytes"]
    return {"seconds": seconds, "cpu_s": cpu, "latencies_us": latencies, "wrong_bytes": wrong}


def run(engine: Engine, depth: int, count: int, most_s: float) -> tuple[float, list[float]]:
    began, latencies = [0.0] * depth, []
    start = last = time.perf_counter()
    for slot in range(depth):
        began[slot] = time.perf_counter()
        engine.begin(slot)
    begun, busy = depth, list(range(depth))
    while busy:
        if time.perf_counter() - last > SPIN_S:
            time.sleep(SLEEP_S)
        for slot in busy[:]:
            if not engine.is_done(slot):
                continue
            last = now = time.perf_counter()
            latencies.append((now - began[slot]) * 1e6)
            if begun >= count or now - start > most_s:
                busy.remove(slot)
                continue
            begun += 1
            began[slot] = now
            engine.begin(slot)
    return time.perf_counter() - start, latencies


def main() -> None:
    # What the engines print would disturb the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, *served = sys.argv[1:]
    # However the parent ends: no engine works on for nobody.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if served:
            serve(name, int(served[0]), answers)
            os._exit(0)
        memory = Memory(json.loads(sys.stdin.readline())["bytes"])
        engine = ENGINES[name]("measures", memory.address, memory.length)
        other = Other(name, memory.length)
        engine.connect(other.said()["offer"])
        tell(answers, {"version": engine.version})
        for line in sys.stdin:
            tell(answers, measured(engine, other, memory, json.loads(line)))
    except Missing as error:
        tell(answers, {"missing": str(error)})
    # Without the destructors of the engines, whose threads may still run.
    os._exit(0)


if __name__ == "__main__":
    main()
