"""The control connection is cut in the middle of a load, and mended: the load ends well, the engine comes back."""

from __future__ import annotations

from collections.abc import Callable

from rig import compare, models
from rig.baseline import baseline
from rig.daemon import Daemon
from rig.engine import Duration, Engine, EngineConfig
from rig.proxy import Wire
from rig.scenario import ask_anew, external_hits, forget, join, store, wait_for_hits
from rig.workload import Workload

CONFIG = EngineConfig(models.LLAMA)
WORKLOAD = Workload(seed=4, prefixes=12, tails=2)


def test_a_connection_cut_in_the_middle_of_a_load_costs_no_token(
    start_daemon: Callable[..., Daemon], start_engine: Callable[..., Engine], report: Callable[[Engine], Duration]
) -> None:
    base = baseline(CONFIG, WORKLOAD)
    known = base.workload.about(0)
    daemon = start_daemon()
    with Wire(daemon.socket) as wire:
        engine = start_engine(CONFIG, daemon.connector(wire.socket), "cut-off")
        join(daemon, engine)
        store(engine, base, [known])
        wait_for_hits(engine, base, known)
        forget(engine)
        before = external_hits(engine)
        engine.stop_at("load", 1, "before")
        engine.begin(known.requests)
        engine.wait_stopped()
        assert wire.cut() > 0, "the engine does not use the wire"
        engine.resume()
        answers = engine.finish()
        compare.same_tokens(base.answers, {answer.id: answer for answer in answers})
        assert external_hits(engine) > before, "the load ended without the promised hits"
        ask_anew(engine, base, [known, base.workload.about(1)])
        wire.mend()
        wait_for_hits(engine, base, known)
        daemon.wait_for("no lease is left", lambda seen: all(s["leased_blocks"] == 0 for s in seen["sessions"]))
        report(engine)
    assert daemon.audit() > 0
