"""The host of a torture: its daemon, its engines, and what is done to them, drawn from one seed.

Holds true: the seed decides what is done and in which order; when a process gets a core, and at which instruction it is
stopped, the machine decides, so a run cannot be repeated exactly. Whatever this process did not do is a failure: a
process that ended, a page that is wrong, an engine that makes no step. A failure ends the run and keeps the files.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rig.daemon import Daemon
from rig.engine import clean_env
from rig.paths import CACHE, CHECKOUT
from rig.process import Child, RigError, wait_until

from torture import records
from torture.content import BLUE, RED, SMALL, SPACES, Space
from torture.reader import READY, Reader
from torture.records import Purges, now

ENGINES: dict[str, Space] = {"red-a": RED, "blue": BLUE, "red-b": RED, "small": SMALL}
CAPACITY_BYTES, UNIT_BYTES = 64 << 20, 2 << 20
DISK_BYTES, DISK_BYTES_PER_SECOND = 192 << 20, 8 << 20
DRAIN_SECONDS = 2
# An engine makes many steps a second. On a busy machine a process may wait long for a core.
STALL_SECONDS = 30.0
LONGEST_STOP = 12.0
LOOK_SECONDS = 1.0  # between two looks at the threads of a daemon that failed
CALM_SECONDS = 60.0
TOOL_SECONDS = 60.0
TICK = 0.02
SABOTAGES = ("flip-down", "flip-up", "foreign", "mixed", "unpurged", "leak")


class Failure(AssertionError):
    """What the torture is looking for."""


@dataclass
class Process:
    child: Child
    number: int
    # Until then it may stand still, because it was stopped.
    excused: float = 0.0
    is_killed: bool = False


@dataclass
class Start:
    """One start of an engine: its scheduler and its workers."""

    engine: str
    scheduler: Process
    workers: list[Process]
    begun: float = field(default_factory=time.monotonic)
    # When what is left of it is killed; None as long as it is whole.
    doomed: float | None = None

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.workers]


@dataclass
class Tool:
    """A command of `forebay` beside everything else."""

    what: str
    process: subprocess.Popen[str]
    begun: int
    disturbances: int
    succeeded: Callable[[str], None]


class Host:
    def __init__(self, seed: int, seconds: float, sabotage: str = "") -> None:
        self.seed, self.seconds, self.sabotage = seed, seconds, sabotage
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.numbers = iter(range(1, 1 << 30))
        self.boards: list[int] = []
        self.starts: list[Start] = []
        self.plain: Process | None = None
        self.tools: list[Tool] = []
        # Grows whenever something is done to the daemon.
        self.disturbances = 0
        self.thaws: float | None = None
        self.has_directory = self.chance.random() < 0.5
        self.daemon = Daemon(
            capacity_bytes=CAPACITY_BYTES,
            unit_bytes=UNIT_BYTES,
            pool={
                "policy": self.chance.choice(["default", "lru", "tinylfu"]),
                # What the scrub finds, engines cannot find.
                "scrub_bytes_per_second": 0 if sabotage == "flip-up" else 256 << 20,
            },
        )
        self.daemon.tiers = self._sections()
        self.records = self.daemon.directory / "records"
        self.records.mkdir()
        self.purges = Purges(self.records)
        self.actions: dict[Callable[[], None], int] = {
            self.stop_a_process: 60,
            self.kill_a_process: 8,
            self.end_an_engine: 4,
            self.kill_daemon: 7,
            self.drain_daemon: 2,
            self.freeze_daemon: 3,
            self.purge: 7,
            self.audit: 2,
            self.inspect: 3,
            self.read_beside: 4,
            self.kill_plain: 2,
        }

    def _sections(self) -> dict[str, dict[str, Any]]:
        sections: dict[str, dict[str, Any]] = {
            # Engines that hold leases make each drain as long as it may be.
            "drain": {"deadline_seconds": DRAIN_SECONDS},
            "tier.ssd": {
                "disks": [str(self.daemon.ssd_path)],
                "capacity_bytes": DISK_BYTES,
                "write_bytes_per_second": DISK_BYTES_PER_SECOND,
                "admission": self.chance.choice(["all", "second_sighting"]),
                "create": True,
            },
        }
        if self.has_directory:
            shared = self.daemon.directory / "shared"
            shared.mkdir()
            sections["tier.fs"] = {
                "directories": [str(shared)],
                "capacity_bytes": DISK_BYTES,
                "store_bytes_per_second": DISK_BYTES_PER_SECOND,
            }
        return sections

    def run(self) -> None:
        with self.daemon:
            try:
                self.begin()
                until = time.monotonic() + self.seconds
                while time.monotonic() < until:
                    self.round(min(until, time.monotonic() + self.chance.uniform(40, 120)))
                self.daemon_ends(self.drain_now())
            except (Failure, RigError) as failure:
                # Of harm that was meant, nothing is worth a look.
                kept = f"kept in {self.keep(failure)}" if not self.sabotage else f"sabotage: {self.sabotage}"
                raise Failure(f"{failure}\n{kept}") from None
            finally:
                self.end()

    def begin(self) -> None:
        self.tracer = subprocess.Popen(
            [sys.executable, "-m", "torture.tracer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_env(),
        )
        self.by = self.answer()["by"]
        if self.by != "ptrace":
            print("ptrace is not allowed here: processes are stopped by SIGSTOP, all threads at once", flush=True)
        self.daemon.start()

    def round(self, until: float) -> None:
        """Some time of torture, and a look at what is left when all is over."""
        for engine in ENGINES:
            self.start(engine)
        self.start_plain()
        act = time.monotonic()
        while time.monotonic() < until:
            self.watch()
            if time.monotonic() >= act:
                [action] = self.chance.choices(list(self.actions), list(self.actions.values()))
                action()
                act = time.monotonic() + self.chance.expovariate(6)
            time.sleep(TICK)
        self.calm()
        self.leave()
        self.counts["rounds"] += 1
        print(f"{self.told()}", flush=True)

    # What is started.

    def spawn(self, what: str, said: dict[str, Any], sockets: Sequence[socket.socket] = ()) -> Process:
        number = next(self.numbers)
        said |= {
            "number": number,
            "sockets": str(self.daemon.socket.parent),
            "records": str(self.records),
            "sabotage": self.sabotage,
        }
        fds = [end.fileno() for end in sockets]
        said |= {"socket": fds[0]} if what == "worker" else {"sockets_of_ranks": fds}
        argv = [sys.executable, "-m", f"torture.{what}", json.dumps(said)]
        child = Child(f"{what} {number}", argv, self.records / f"{what}-{number}.log", env=_env(), pass_fds=fds)
        self.boards.append(number)
        self.counts[f"{what}s"] += 1
        return Process(child, number)

    def start(self, engine: str) -> None:
        space = ENGINES[engine]
        incarnation = self.chance.randbytes(16).hex()
        common = {"engine": engine, "incarnation": incarnation, "space": SPACES.index(space)}
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(space.ranks)]
        for pair in pairs:
            for end in pair:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        workers = [self.spawn("worker", common | {"rank": rank}, [pairs[rank][1]]) for rank in range(space.ranks)]
        scheduler = self.spawn("scheduler", common | {"seed": self.chance.random()}, [pair[0] for pair in pairs])
        for pair in pairs:
            pair[0].close()
            pair[1].close()
        self.starts.append(Start(engine, scheduler, workers))

    def start_plain(self) -> None:
        self.plain = self.spawn("plain", {"seed": self.chance.random(), "may_purge": not self.has_directory})

    # What is done.

    def whole(self) -> list[Start]:
        return [start for start in self.starts if start.doomed is None]

    def stop_a_process(self) -> None:
        start = self.chance.choice(self.starts) if self.starts else None
        if start is None:
            return
        process = self.chance.choice(start.processes)
        is_worker = process is not start.scheduler
        hold = min(LONGEST_STOP, 10 ** self.chance.uniform(-2.5, 1.1))
        end = "kill" if self.chance.random() < 0.2 else "resume"
        if process.is_killed or process.excused > time.monotonic():
            return
        process.excused = time.monotonic() + hold + 3
        self.ask(
            pid=process.child.pid,
            aim=is_worker and self.chance.random() < 0.8,
            alone=self.chance.random() < 0.5,
            steps=self.chance.choice([0, 1, 10, 200]),
            hold=hold,
            end=end,
            seed=self.chance.random(),
        )
        told = self.answer()
        while "stopped" not in told:
            told = self.answer()
        self.counts["stops"] += told["stopped"]
        self.counts["stops_amid_a_copy"] += told["in_copy"]
        self.counts["single_steps"] += told["steps"]
        if end == "kill":
            process.is_killed = True
            self.counts["killed_where_stopped"] += 1
            self.break_up(start, time.monotonic() + hold)

    def kill_a_process(self) -> None:
        starts = self.whole()
        if starts:
            start = self.chance.choice(starts)
            process = self.chance.choice(start.processes)
            process.is_killed = True
            process.child.kill()
            self.counts["killed_engine_processes"] += 1
            self.break_up(start, time.monotonic())

    def break_up(self, start: Start, moment: float) -> None:
        """A process of it is gone at that moment. The others live on for a while, perhaps beside the next start."""
        start.doomed = moment + self.chance.choice([0.0, self.chance.uniform(0, LONGEST_STOP)])

    def end_an_engine(self) -> None:
        """In order: the scheduler says farewell, and its workers go with it."""
        moment = time.monotonic()
        starts = [
            start
            for start in self.whole()
            if all(
                process.excused < moment and records.board(self.records, process.number) for process in start.processes
            )
        ]
        if starts:
            self.farewell(self.chance.choice(starts))

    def farewell(self, start: Start) -> None:
        os.kill(start.scheduler.child.pid, signal.SIGTERM)
        for process in start.processes:
            process.is_killed = True
            # A step may wait for a daemon that is away, and for a lookup that is late.
            if (status := process.child.wait(STALL_SECONDS)) != 0:
                raise Failure(str(process.child.failure(f"of {start.engine} ended with status {status}")))
            process.child.kill()
        self.starts.remove(start)
        self.counts["farewells"] += 1

    def kill_plain(self) -> None:
        assert self.plain is not None
        self.plain.child.kill()
        self.start_plain()

    def kill_daemon(self) -> None:
        self.disturb()
        self.daemon.kill()
        self.counts["killed_daemons"] += 1
        if self.chance.random() < 0.7:
            self.read("down")
        time.sleep(self.chance.choice([0.0, self.chance.uniform(0, 3)]))
        while self.chance.random() < 0.2:
            self.daemon.launch()
            time.sleep(self.chance.uniform(0, 0.3))
            self.daemon.kill()
            self.counts["killed_in_recovery"] += 1
        self.start_daemon()

    def drain_daemon(self) -> None:
        self.daemon_ends(self.drain_now())
        if self.chance.random() < 0.3:
            self.read("down")
        if self.chance.random() < 0.3:
            self.inspect_disk()
        self.start_daemon()

    def drain_now(self) -> int:
        self.disturb()
        self.counts["drained_daemons"] += 1
        return self.daemon.drain()

    def daemon_ends(self, status: int) -> None:
        if status != 0:
            raise Failure(str(self.daemon.running.failure(f"ended its drain with status {status}")))

    def start_daemon(self) -> None:
        self.daemon.running.kill()
        self.daemon.start()
        self.counts["started_daemons"] += 1

    def freeze_daemon(self) -> None:
        self.disturb()
        self.daemon.freeze()
        self.thaws = time.monotonic() + self.chance.uniform(0.1, 3)
        self.counts["frozen_daemons"] += 1

    def disturb(self) -> None:
        self.thaw()
        self.disturbances += 1

    def thaw(self) -> None:
        if self.thaws is not None:
            self.daemon.thaw()
            self.thaws = None
            self.disturbances += 1

    # The command.

    def tool(self, what: str, argv: list[str], succeeded: Callable[[str], None]) -> None:
        if any(tool.what == what for tool in self.tools):
            return
        env = _env() | {"FOREBAY_SOCKET_DIRECTORY": str(self.daemon.socket.parent)}
        begun = now()
        process = subprocess.Popen(
            [str(self.daemon.binary), *argv], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.tools.append(Tool(what, process, begun, self.disturbances, succeeded))

    def purge(self) -> None:
        space = self.chance.choice(SPACES)
        shared = ["--shared-stores"] if self.has_directory else []
        begun = now()
        if self.chance.random() < 0.5 and self.thaws is None:
            ids = [one["namespace_id"] for one in self.daemon.inspect()["namespaces"] if one["fields"] == space.fields]
            whose, what = space.path, ["--namespace", *ids]
            if not ids:
                return
        else:
            whose, what = space.tenant, ["--tenant", space.tenant]

        def succeeded(_answer: str) -> None:
            self.purges.succeeded(whose, begun)
            self.counts["purges"] += 1

        self.tool("purge", ["purge", *what, *shared, "--json"], succeeded)

    def audit(self) -> None:
        def succeeded(answer: str) -> None:
            self.counts["audits"] += 1
            self.counts["audited_blocks"] += json.loads(answer)["blocks"]

        self.tool("audit", ["audit", "--json"], succeeded)

    def inspect(self) -> None:
        def succeeded(answer: str) -> None:
            json.loads(answer)
            self.counts["inspects"] += 1

        self.tool("inspect", ["inspect", "--json"], succeeded)

    def inspect_disk(self) -> None:
        argv = [str(self.daemon.binary), "inspect", "ssd", str(self.daemon.ssd_path), "--audit"]
        done = subprocess.run(argv, env=_env(), capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
        if done.returncode != 0:
            raise Failure(f"`forebay inspect ssd --audit` failed: {done.stdout}{done.stderr}")
        self.counts["disk_audits"] += 1

    def watch_tools(self) -> None:
        for tool in list(self.tools):
            is_undisturbed = tool.disturbances == self.disturbances
            if tool.process.poll() is None:
                if is_undisturbed and now() - tool.begun > TOOL_SECONDS * 1e9:
                    raise Failure(f"`forebay {tool.what}` did not end within {TOOL_SECONDS:g} s")
                continue
            self.tools.remove(tool)
            output, _ = tool.process.communicate()
            if tool.process.returncode == 0:
                tool.succeeded(output)
            elif is_undisturbed and "knows no" not in output:
                raise Failure(f"`forebay {tool.what}` failed with {tool.process.returncode}: {output}")
            else:
                self.counts[f"disturbed_{tool.what}s"] += 1

    # What is looked at.

    def read(self, when: str) -> Counter[str]:
        """The pool's files, all of them."""
        if self.sabotage == "flip-down" and when == "down":
            self.flip(1)
        report = Reader(self.daemon.pool_directory, self.purges).read()
        return self.judge(report.complaints, report.counts, when)

    def read_beside(self) -> None:
        """Some slots, while everybody goes on."""
        report = Reader(self.daemon.pool_directory, self.purges).read(300, self.chance)
        self.judge(report.complaints, report.counts, "up")

    def judge(self, complaints: list[str], counts: Counter[str], when: str) -> Counter[str]:
        self.counts[f"reads_{when}"] += 1
        for what in ("ready", "pages", "reserved", "torn", "twice", "changed"):
            self.counts[f"read_{what}_{when}"] += counts[what]
        if complaints:
            raise Failure(f"the reader of the pool's files ({when}): " + "\n".join(complaints[:20]))
        return counts

    def watch(self) -> None:
        """What must hold at any time."""
        moment = time.monotonic()
        if self.thaws is not None and moment > self.thaws:
            self.thaw()
        if not self.daemon.is_running():
            child = self.daemon.running
            raise Failure(str(child.failure(f"ended by itself with status {child.status}")))
        if complaints := records.failures(self.records):
            raise Failure("\n".join(complaints[:20]))
        self.watch_tools()
        for start in list(self.starts):
            self.watch_start(start, moment)
        self.start_again()
        assert self.plain is not None
        self.alive(self.plain, moment, 2 * STALL_SECONDS)

    def watch_start(self, start: Start, moment: float) -> None:
        if start.doomed is not None and moment > start.doomed:
            for process in start.processes:
                process.child.kill()
            self.starts.remove(start)
        elif start.doomed is None:
            excused = max(process.excused for process in start.processes)
            for process in start.processes:
                self.alive(process, moment, STALL_SECONDS, max(start.begun, excused))

    def start_again(self) -> None:
        """An engine that is not whole: often beside what is left of the start before, else when that is gone."""
        whole, present = {start.engine for start in self.whole()}, {start.engine for start in self.starts}
        for engine in ENGINES:
            if engine not in whole and (engine not in present or self.chance.random() < 0.02):
                self.start(engine)

    def alive(self, process: Process, moment: float, seconds: float, excused: float = 0.0) -> None:
        if process.is_killed:
            return
        child = process.child
        if not child.is_running():
            raise Failure(str(child.failure(f"ended by itself with status {child.status}")))
        said = records.board(self.records, process.number)
        last = max(excused, said["at"] / 1e9) if said else moment
        if moment - last > seconds:
            raise Failure(str(child.failure(f"makes no step since {moment - last:.1f} s; it said last: {said}")))

    def calm(self) -> None:
        """Nothing is done any more: each engine has to come back and to load blocks."""
        self.thaw()
        self.resume()
        before = self.loaded()

        def is_back() -> bool:
            self.watch()
            present = self.loaded()
            return (
                all(start.doomed is None for start in self.starts)
                and {start.engine for start in self.starts} == set(ENGINES)
                and all(self.stands(start) == "ready" for start in self.starts)
                and all(count > before.get(number, 0) for number, count in present.items())
                and not self.tools
            )

        try:
            wait_until("all engines load blocks again", is_back, CALM_SECONDS)
        except RigError:
            states = {start.engine: (self.stands(start), start.doomed) for start in self.starts}
            raise Failure(f"not all engines came back within {CALM_SECONDS:g} s: {states}; {self.loaded()}") from None
        if self.sabotage == "unpurged":
            self.purges.succeeded("red", now())
            self.purges.succeeded("blue", now())
        if self.sabotage == "flip-up":
            self.flip(1 << 20)
            wait_until("an engine notices", self.watch, CALM_SECONDS)
        self.read("up")
        self.audit()
        while self.tools:
            self.watch()
            time.sleep(TICK)

    def loaded(self) -> dict[int, int]:
        numbers = [start.scheduler.number for start in self.starts]
        return {number: self.count(number, "loaded_blocks") for number in numbers}

    def count(self, number: int, what: str) -> int:
        return int(records.board(self.records, number).get("counts", {}).get(what, 0))

    def stands(self, start: Start) -> str:
        return str(records.board(self.records, start.scheduler.number).get("state"))

    def leave(self) -> None:
        """All engines and clients go; nothing is held after them, before and after another start of the daemon."""
        for start in list(self.starts):
            if self.chance.random() < 0.5:
                self.farewell(start)
        for start in self.starts:
            for process in start.processes:
                if not (self.sabotage == "leak" and process in start.workers):
                    process.child.kill()
        assert self.plain is not None
        self.plain.child.kill()
        self.watch_nothing_is_held()
        is_killed = self.chance.random() < 0.5
        if is_killed:
            self.disturb()
            self.daemon.kill()
            self.counts["killed_daemons"] += 1
        else:
            self.daemon_ends(self.drain_now())
        counts = self.read("down")
        # A daemon that is killed may be moving blocks out of an extent. It reserves their next slots for no engine.
        if held := counts["reserved"] - is_killed * counts["reserved_by_daemon"]:
            raise Failure(f"{held} slots are reserved in the table when all engines are gone")
        self.start_daemon()
        self.watch_nothing_is_held()
        self.starts.clear()
        self.records_of_ended()

    def watch_nothing_is_held(self) -> None:
        def is_free(seen: dict[str, Any]) -> bool:
            classes = seen["classes"]
            return (
                not seen["sessions"]
                and seen["pinned_bytes"] == seen["fenced_bytes"] == 0
                and all(one["pinned"] == 0 and one["ready"] + one["free"] == one["slots"] for one in classes)
            )

        self.daemon.wait_for("nothing is held when all engines are gone", is_free, 30)
        self.counts["leak_checks"] += 1

    def records_of_ended(self) -> None:
        """Logs of processes that ended as they should are not kept: an hour has thousands."""
        if complaints := records.failures(self.records):
            raise Failure("\n".join(complaints[:20]))
        for path in self.records.glob("*-*.log"):
            path.unlink()

    def flip(self, count: int) -> None:
        """Sabotage: a bit in the middle of so many blocks that are ready."""
        reader = Reader(self.daemon.pool_directory)
        reader._header()
        slots = [slot for slot in reader._slots() if reader._entry(slot)[0][4:8] == READY]
        reader.files.close()
        [data] = [path for path in self.daemon.pool_directory.rglob("data")]
        with data.open("r+b") as file:
            for slot in self.chance.sample(slots, min(count, len(slots))):
                at = slot.page * 4096 + 2000
                file.seek(at)
                [byte] = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 4]))

    # The tracer.

    def ask(self, **asked: Any) -> None:
        assert self.tracer.stdin is not None
        self.tracer.stdin.write(json.dumps(asked) + "\n")
        self.tracer.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.tracer.stdout is not None
        line = self.tracer.stdout.readline()
        if not line:
            raise Failure("the tracer ended")
        told: dict[str, Any] = json.loads(line)
        return told

    def resume(self) -> None:
        """Ends all stops."""
        self.ask(all=True)
        while not self.answer().get("all"):
            pass
        moment = time.monotonic()
        for start in self.starts:
            for process in start.processes:
                process.excused = min(process.excused, moment)

    # The end.

    def told(self) -> str:
        counts = Counter(self.counts)
        for number in self.boards:
            counts.update(records.board(self.records, number).get("counts", {}))
        return json.dumps(dict(sorted(counts.items())))

    def keep(self, failure: AssertionError) -> Path:
        """The files as they are, before anything else changes them, and what the daemon's threads were doing."""
        kept = CACHE / "torture" / f"{self.seed}-{int(time.time())}"
        kept.mkdir(parents=True)
        if self.daemon.child is not None:
            (kept / "threads").write_text(threads(self.daemon.running.pid))
            self.daemon.kill()
        (kept / "failure").write_text(f"seed {self.seed}\n{failure}\n{self.told()}\n")
        pool = ["cp", "-r", "--sparse=always", str(self.daemon.pool_directory), str(kept / "pool")]
        subprocess.run(pool, check=True)
        for name in ("daemon.log", "forebay.toml", "records", "ssd"):
            if (path := self.daemon.directory / name).exists():
                subprocess.run(["cp", "-r", "--sparse=always", str(path), str(kept)], check=True)
        return kept

    def end(self) -> None:
        for start in self.starts:
            for process in start.processes:
                process.child.kill()
        if self.plain is not None:
            self.plain.child.kill()
        for tool in self.tools:
            tool.process.kill()
        self.tracer.kill()
        self.tracer.wait()
        print(f"{self.told()}", flush=True)


def threads(pid: int) -> str:
    """Where the threads of a process are in the kernel, twice, and what the machine waits for: of a process that stands
    still, this says whether it spins, sleeps, or has no core or no disk. The stacks take root."""
    said = []
    for look in range(2):
        time.sleep(look * LOOK_SECONDS)
        files = [*Path("/proc/pressure").glob("*"), Path("/proc/loadavg")]
        for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
            files += [task / name for name in ("comm", "stat", "schedstat", "wchan", "stack")]
        said += [f"{path}: {_text(path)}" for path in files]
    return "\n".join(said) + "\n"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return str(error)


def _env() -> dict[str, str]:
    return clean_env() | {"PYTHONPATH": str(CHECKOUT / "tests"), "PYTHONUNBUFFERED": "1"}
