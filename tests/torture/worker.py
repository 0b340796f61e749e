"""One rank of an engine: its tensors, its `WorkerEngine`, and the comparison of each page that it loads.

Commands come from its scheduler over a socket, as JSON; this process knows its engine from them and from its arguments.
When the scheduler is gone, it keeps the pool mapped and its copies running until somebody kills it: an engine's worker
may outlive everything else.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from forebay import WorkerEngine

from torture.content import SPACES, Group, Slice, Space
from torture.records import Board

ROWS = 64
MESSAGE_BYTES = 1 << 20


class Rank:
    def __init__(self, said: dict[str, Any]) -> None:
        self.space: Space = SPACES[said["space"]]
        self.rank: int = said["rank"]
        self.sabotage: str = said["sabotage"]
        self.board = Board(Path(said["records"]), said["number"])
        self.scheduler = socket.socket(fileno=said["socket"])
        pages: dict[int, int] = {}
        for group in self.space.groups:
            for tensor, page in group.refs:
                pages[tensor] = max(pages.get(tensor, 0), page)
        # A row is wider than its page, as an engine's may be.
        self.strides = [page + 64 for _, page in sorted(pages.items())]
        self.tensors = [mmap.mmap(-1, stride * ROWS) for stride in self.strides]
        addresses = [ctypes.addressof(ctypes.c_ubyte.from_buffer(tensor)) for tensor in self.tensors]
        self.worker = WorkerEngine(
            said["sockets"],
            said["engine"],
            self.rank,
            self.space.ranks,
            incarnation=bytes.fromhex(said["incarnation"]),
            tensors=[
                (address, ROWS, stride, page)
                for address, stride, (_, page) in zip(addresses, self.strides, sorted(pages.items()), strict=True)
            ],
            groups=[(group.group, False, group.refs) for group in self.space.groups],
            threads=2,
        )
        self.jobs: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        listens = True
        while listens or self.jobs:
            wait = 0.0 if self.jobs else 1.0
            if listens and select.select([self.scheduler], [], [], wait)[0]:
                listens = self.listen()
            if self.jobs:
                self.worker.wait(list(self.jobs)[:1], 0.005)
            for job, is_whole, _, _ in self.worker.finished():
                self.tell(self.ended(self.jobs.pop(job), is_whole))
            self.board.show(self.worker.state())
        while True:
            self.board.show("orphan")
            time.sleep(1.0)

    def listen(self) -> bool:
        """Whether there is a scheduler."""
        try:
            said = self.scheduler.recv(MESSAGE_BYTES)
        except OSError:
            said = b""
        if not said:
            return False
        command = json.loads(said)
        if command["do"] == "end":
            self.worker.shutdown()
            os._exit(0)
        self.jobs[command["job"]] = command
        self.begin(command)
        return True

    def begin(self, command: dict[str, Any]) -> None:
        is_store = command["do"] == "store"
        groups = []
        for number, slots, generations, rows, names in command["groups"]:
            group = self.space.group(number)
            assert group is not None
            for row, name in zip(rows, names, strict=True):
                whole = Slice(self.space, group, self.rank, bytes.fromhex(name))
                # What is there when a load copied nothing is no block's.
                self.put(group, row, self.harmed(whole, command) if is_store else b"\xee" * group.slice_bytes)
            packed = b"".join(row.to_bytes(4, "little") for row in rows)
            groups.append((number, bytes.fromhex(slots), bytes.fromhex(generations), packed, 0))
        submit = self.worker.submit_store if is_store else self.worker.submit_load
        submit(command["job"], bytes.fromhex(command["pool"]), groups)

    def harmed(self, whole: Slice, command: dict[str, Any]) -> bytes:
        """The content to store: of the right block, unless this run is to show that others are noticed."""
        content = whole.content(command["store"])
        if self.sabotage == "foreign" and command["store"] % 16 == 0:
            other = Slice(whole.space, whole.group, whole.rank, bytes(len(whole.hash)))
            content = other.content(command["store"])[:4096] + content[4096:]
        if self.sabotage == "mixed" and command["store"] % 16 == 0:
            content = content[:4096] + whole.content(command["store"] - 1)[4096:]
        return content

    def put(self, group: Group, row: int, content: bytes) -> None:
        for tensor, page in group.refs:
            at = row * self.strides[tensor]
            self.tensors[tensor][at : at + page] = content[:page]
            content = content[page:]

    def take(self, group: Group, row: int) -> bytes:
        starts = [(tensor, row * self.strides[tensor], page) for tensor, page in group.refs]
        return b"".join(self.tensors[tensor][at : at + page] for tensor, at, page in starts)

    def ended(self, command: dict[str, Any], is_whole: bool) -> dict[str, Any]:
        report: dict[str, Any] = {"job": command["job"], "whole": is_whole, "stores": [], "state": self.worker.state()}
        self.board.add(f"{command['do']}_jobs" if is_whole else f"failed_{command['do']}_jobs")
        if corrupt := self.worker.corrupt_loads():
            self.board.fail(f"{corrupt} loads were not what their birth records say")
        if command["do"] == "store" or not is_whole:
            return report
        for number, _, _, rows, names in command["groups"]:
            group = self.space.group(number)
            assert group is not None
            for row, name in zip(rows, names, strict=True):
                found = self.take(group, row)
                store, complaint = Slice(self.space, group, self.rank, bytes.fromhex(name)).judge(found)
                if complaint:
                    self.board.fail(f"loaded by rank {self.rank}: {complaint}")
                report["stores"].append(store)
                self.board.add("pages_loaded", -(-len(found) // 4096))
        return report

    def tell(self, report: dict[str, Any]) -> None:
        try:
            self.scheduler.send(json.dumps(report).encode())
        except OSError:
            self.board.add("reports_to_nobody")


if __name__ == "__main__":
    Rank(json.loads(sys.argv[1])).run()
