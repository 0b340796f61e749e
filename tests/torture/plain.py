"""Plain clients beside the engines: put, get, look up and, seldom, purge, for both tenants, by `forebay.Client`."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from forebay import Client, ForebayError

from torture.content import PLAIN, Slice, Space
from torture.records import Board, Purges, Writer, now

# What a daemon that is killed, stopped or full may answer; anything else is a mistake of somebody.
EXPECTED = ("unavailable", "timeout", "full", "io")
PURGES = 0.003


class Plain:
    def __init__(self, said: dict[str, Any]) -> None:
        self.chance = random.Random(said["seed"])
        records = Path(said["records"])
        self.board = Board(records, said["number"])
        self.purges = Purges(records)
        self.writer = Writer(records, said["number"])
        self.may_purge: bool = said["may_purge"]
        self.client = Client(said["sockets"], deadline=5.0)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while True:
            self.board.show("ready")
            try:
                self.step(self.chance.choice(PLAIN))
                self.board.add("steps")
            except ForebayError as error:
                self.board.add(f"refused_{error.kind}")
                if error.kind not in EXPECTED:
                    self.board.fail(f"a plain client was answered {error.kind}: {error}")
                time.sleep(0.05)

    def step(self, space: Space) -> None:
        [group] = space.groups
        handle = self.client.open_namespace(space.fields, {0: group.slice_bytes})
        hashes = space.hashes(self.chance.randrange(space.prompts), self.chance.randint(1, space.longest))
        if self.chance.random() < PURGES and self.may_purge:
            self.purge(space.tenant)
        if self.chance.random() < 0.3:
            store = self.writer.next()
            blocks = [(name, Slice(space, group, 0, name).content(store)) for name in hashes]
            outcomes = self.client.put(handle, 0, blocks)
            self.writer.acknowledged([store])
            for outcome in outcomes:
                self.board.add(f"put_{outcome}")
            return
        looked = now()
        if self.chance.random() < 0.3:
            self.board.add("looked_up", sum(self.client.lookup(handle, 0, hashes)))
            return
        for name, found in zip(hashes, self.client.get(handle, 0, hashes), strict=True):
            if found is None:
                self.board.add("get_missed")
                continue
            store, complaint = Slice(space, group, 0, name).judge(found)
            if complaint:
                self.board.fail(f"got: {complaint}")
            if late := self.purges.complaint(space, store, looked):
                self.board.fail(f"got: {late}")
            self.board.add("got_blocks")
        time.sleep(self.chance.random() * 0.02)

    def purge(self, tenant: str) -> None:
        begun = now()
        self.client.purge(tenant=tenant, wait_seconds=10)
        self.purges.succeeded(tenant, begun)
        self.board.add("purges")


if __name__ == "__main__":
    Plain(json.loads(sys.argv[1])).run()
