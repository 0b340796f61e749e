"""The scheduler side of an engine: looks up, loads and stores prompts at random, through `EngineSession`.

It goes on as an engine does, whatever happens to the daemon. A step that does not end, an answer after its deadline, a
block of an old purge or another store under one lease is a failure; what is lost with a daemon is counted.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay import EngineSession, Ticket

from torture.content import SPACES, Group, Space
from torture.records import Board, Purges, Writer, now
from torture.worker import MESSAGE_BYTES, ROWS

DEADLINE = 1.0
# So often a lookup is asked for its answer, each time for so long: a stop of this process may fall into some of them.
ANSWER_ASKED, ANSWER_SECONDS = 4, 15.0
PATIENCE = 2.0
HELD = 3
MISS, IS_READY, PROMOTING = 0, 1, 2

Part = tuple[int, str, str, list[int], list[str]]


class Over(Exception):
    """A rank is gone."""


@dataclass
class Loaded:
    """A ticket whose blocks were loaded once, and are to be the same again."""

    ticket: Ticket
    parts: list[Part]
    looked: int
    stores: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, said: dict[str, Any]) -> None:
        self.space: Space = SPACES[said["space"]]
        self.chance = random.Random(said["seed"])
        records = Path(said["records"])
        self.board = Board(records, said["number"])
        self.purges = Purges(records)
        self.writer = Writer(records, said["number"])
        self.ranks = [socket.socket(fileno=number) for number in said["sockets_of_ranks"]]
        self.session = EngineSession(
            said["sockets"],
            said["engine"],
            self.space.ranks,
            incarnation=bytes.fromhex(said["incarnation"]),
            stock_blocks=16,
            deadline=DEADLINE,
        )
        self.session.set_namespace(
            self.space.fields, [(group.group, group.attention, 16, False) for group in self.space.groups]
        )
        self.jobs = 0
        self.early: dict[int, dict[int, dict[str, Any]]] = {}  # by job and rank: reports that nobody asked for yet
        self.held: list[Loaded] = []
        self.unacknowledged: list[int] = []
        self.ends = False

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self.end)
        try:
            while not self.ends:
                self.board.show(self.session.state())
                self.step()
                self.acknowledge()
            for loaded in self.held:
                loaded.ticket.release()
            self.session.close()
            for rank in self.ranks:
                rank.send(json.dumps({"do": "end"}).encode())
        except (Over, OSError):
            # The others of this engine may live on for a while; it is theirs who started them to end them.
            while True:
                self.board.show("orphan")
                time.sleep(1.0)

    def end(self, _number: int, _frame: object) -> None:
        self.ends = True

    def step(self) -> None:
        self.board.add("steps")
        if self.held and self.chance.random() < 0.3:
            self.load_again(self.held.pop(self.chance.randrange(len(self.held))))
        prompt = min(int(self.chance.paretovariate(0.5)) - 1, self.space.prompts - 1)
        if self.chance.random() < 0.4:
            prompt = self.chance.randrange(self.space.prompts)
        hashes = self.space.hashes(prompt, self.chance.randint(1, self.space.longest))
        if is_hinted := self.chance.random() < 0.2:
            self.session.hint(prompt, [(group.group, hashes) for group in self.space.groups])
            self.rest()
        looked = now()
        ticket = self.look_up(hashes)
        if is_hinted:
            self.session.withdraw_hint(prompt)
        if ticket is not None:
            self.use(ticket, hashes, looked)
        if self.session.state() != "ready":
            self.rest()

    def rest(self) -> None:
        time.sleep(self.chance.random() * 0.02)

    def look_up(self, hashes: list[bytes]) -> Ticket | None:
        """With an answer; None if the daemon cannot be asked."""
        begun = time.monotonic()
        ticket = self.session.lookup([(group.group, hashes) for group in self.space.groups])
        if not any(ticket.poll(ANSWER_SECONDS) for _ in range(ANSWER_ASKED)):
            waited = time.monotonic() - begun
            self.board.fail(f"a lookup with a deadline of {DEADLINE} s had no answer after {waited:.1f} s")
        if ticket.has_failed():
            self.board.add("failed_lookups")
            return None
        self.board.add("lookups")
        patience = time.monotonic() + self.chance.random() * PATIENCE
        while self.promoting(ticket) and time.monotonic() < patience:
            self.rest()
        if self.promoting(ticket):
            ticket.stop_waiting()
            self.board.add("impatient_lookups")
        return ticket

    def promoting(self, ticket: Ticket) -> bool:
        return any(PROMOTING in ticket.states(position) for position in range(len(self.space.groups)))

    def use(self, ticket: Ticket, hashes: list[bytes], looked: int) -> None:
        """Loads what is ready and stores what is missing, at the same time."""
        loads, stores, row = [], [], 0
        for position, group in enumerate(self.space.groups):
            states = ticket.states(position)
            ready = [at for at, state in enumerate(states) if state == IS_READY]
            slots, generations = ticket.slots(position), ticket.generations(position)
            self.board.add("from_tiers", sum(source > 0 for source in ticket.sources(position)))
            picked = [(slots[4 * at : 4 * at + 4], generations[4 * at : 4 * at + 4]) for at in ready]
            if ready:
                rows = list(range(row, row + len(ready)))
                row += len(ready)
                loads.append(self.part(group, picked, rows, [hashes[at] for at in ready]))
            missing = next((at for at, state in enumerate(states) if state == MISS), len(hashes))
            if missing < len(hashes):
                stores.append((group, missing))
        loaded = Loaded(ticket, loads, looked)
        load = self.submit("load", ticket.pool, loads) if loads else None
        for group, missing in stores:
            self.store(group, hashes, missing, row)
        if load is not None:
            self.check(loaded, load)
        if loads and len(self.held) < HELD and self.chance.random() < 0.2:
            self.held.append(loaded)
        elif self.chance.random() < 0.9:
            ticket.release()

    def part(self, group: Group, picked: Sequence[tuple[bytes, bytes]], rows: list[int], hashes: list[bytes]) -> Part:
        slots = b"".join(slot for slot, _ in picked).hex()
        generations = b"".join(generation for _, generation in picked).hex()
        return group.group, slots, generations, rows, [name.hex() for name in hashes]

    def store(self, group: Group, hashes: list[bytes], first: int, row: int) -> None:
        slots, generations = self.session.reserve(group.group, min(len(hashes) - first, ROWS - row))
        count = len(slots) // 4
        if count == 0:
            self.board.add("no_slots")
            return
        names = hashes[first : first + count]
        number = self.writer.next()
        pairs = [(slots[4 * at : 4 * at + 4], generations[4 * at : 4 * at + 4]) for at in range(count)]
        part = self.part(group, pairs, list(range(row, row + count)), names)
        job = self.submit("store", self.session.pool, [part], number)
        is_whole = all(report["whole"] for report in self.reports(job))
        if not is_whole or self.chance.random() < 0.05:
            self.session.abort(group.group, slots, generations)
            self.board.add("aborted_blocks" if is_whole else "failed_stores", count)
            return
        self.session.commit(group.group, names, hashes[first - 1] if first else None, slots, generations)
        self.unacknowledged.append(number)
        self.board.add("stored_blocks", count)

    def submit(self, what: str, pool: bytes, parts: list[Part], store: int = 0) -> int:
        self.jobs += 1
        command = {"do": what, "job": self.jobs, "pool": pool.hex(), "groups": parts, "store": store}
        for rank in self.ranks:
            rank.send(json.dumps(command).encode())
        return self.jobs

    def reports(self, job: int) -> list[dict[str, Any]]:
        """Of all ranks; a copy has no deadline, but a rank may be gone."""
        while len(self.early.get(job, {})) < len(self.ranks):
            for rank in select.select(self.ranks, [], [], 1.0)[0]:
                said = rank.recv(MESSAGE_BYTES)
                if not said:
                    raise Over
                report = json.loads(said)
                self.early.setdefault(report["job"], {})[self.ranks.index(rank)] = report
        by_rank = self.early.pop(job)
        return [by_rank[at] for at in range(len(self.ranks))]

    def check(self, loaded: Loaded, job: int) -> None:
        reports = self.reports(job)
        if not all(report["whole"] for report in reports):
            states = [report["state"] for report in reports]
            self.board.fail(f"a load of leased blocks failed: session {self.session.state()}, ranks {states}")
            return
        for per_rank in zip(*(report["stores"] for report in reports), strict=True):
            if len(set(per_rank)) > 1:
                self.board.fail(f"the slices of one block are of stores {[hex(store) for store in per_rank]}")
        stores = reports[0]["stores"]
        if loaded.stores and stores != loaded.stores:
            self.board.fail(f"blocks under one lease were of stores {loaded.stores}, and are of {stores}")
        loaded.stores = stores
        for store in set(stores):
            if complaint := self.purges.complaint(self.space, store, loaded.looked):
                self.board.fail(f"loaded: {complaint}")
        self.board.add("loaded_blocks", len(stores))

    def load_again(self, loaded: Loaded) -> None:
        if loaded.stores:
            self.check(loaded, self.submit("load", loaded.ticket.pool, loaded.parts))
            self.board.add("loaded_again")
        loaded.ticket.release()

    def acknowledge(self) -> None:
        if self.unacknowledged and self.session.stats()["queued"] == 0:
            self.writer.acknowledged(self.unacknowledged)
            self.unacknowledged.clear()


if __name__ == "__main__":
    Scheduler(json.loads(sys.argv[1])).run()
    os._exit(0)
