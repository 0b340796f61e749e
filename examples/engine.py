"""An engine in sixty lines, on the mapped pool: `python examples/engine.py`. Needs numpy.

Its KV cache is a numpy array with a row for each block. A real engine has the session in its scheduler and a worker in
each rank's process; they share nothing but the engine's id and its incarnation.
"""

import hashlib
import os
import time
from collections.abc import Callable

import forebay
import numpy as np

ROWS, BLOCK_BYTES, TOKENS = 8, 65536, 16

cache = np.zeros((ROWS, BLOCK_BYTES), np.uint8)
start = os.urandom(16)  # the incarnation: it names this start of the engine
session = forebay.EngineSession(None, "example", ranks=1, incarnation=start)
session.set_namespace({"model": "engine", "revision": "1"}, [(0, "full", TOKENS, False)])
tensors = [(cache.ctypes.data, ROWS, BLOCK_BYTES, BLOCK_BYTES)]
groups = [(0, False, [(0, BLOCK_BYTES)])]
worker = forebay.WorkerEngine(None, "example", 0, 1, incarnation=start, tensors=tensors, groups=groups)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, (session.reason(), worker.reason())
        time.sleep(0.01)


def store(rows: list[int], hashes: list[bytes]) -> None:
    # The session fills its stock of slots in the background, while something is asked of it. A real engine does not
    # wait: it stores the blocks for which it got slots.
    slots, generations = b"", b""

    def has_slots() -> bool:
        nonlocal slots, generations
        more = session.reserve(0, len(rows) - len(slots) // 4)
        slots, generations = slots + more[0], generations + more[1]
        return len(slots) == 4 * len(rows)

    until(has_slots)
    worker.submit_store(1, session.pool, [(0, slots, generations, np.array(rows, "<i4").tobytes(), 0)])
    assert worker.wait([1], 5) and worker.finished()[0][1], "a copy failed: abort the slots"
    session.commit(0, hashes, None, slots, generations)


def load(rows: list[int], hashes: list[bytes]) -> int:
    ticket = session.lookup([(0, hashes)])
    states = ticket.states(0) if ticket.poll(1) else b""  # 1: ready; 2: not yet; 0: a miss
    hits = len(states) - len(states.lstrip(b"\1"))
    if hits:
        slots, generations = ticket.slots(0)[: 4 * hits], ticket.generations(0)[: 4 * hits]
        worker.submit_load(2, ticket.pool, [(0, slots, generations, np.array(rows[:hits], "<i4").tobytes(), 0)])
        assert worker.wait([2], 5) and worker.finished()[0][1], "a copy failed: compute the blocks"
    ticket.release()  # after the loads, not before
    return hits


until(lambda: session.state() == worker.state() == "ready")
keys = [hashlib.sha256(f"prompt, block {number}".encode()).digest() for number in range(3)]
cache[:3] = np.random.default_rng(1).integers(0, 256, (3, BLOCK_BYTES))
store([0, 1, 2], keys)
until(lambda: load([5, 6, 7], keys) == 3)  # a commit is delivered in the background
assert (cache[5:8] == cache[:3]).all()
print("three blocks went to the pool and came back")
worker.shutdown()
session.close()
