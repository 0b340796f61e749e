"""What Forebay brings on this machine's CPU: `forebay-compare` against two real vLLM servers, one with Forebay.

`python bench/compare.py [OPTION...]`, with PYTHONPATH=python:tests, a built `forebay` and the options of
`forebay-compare`, such as `--workload documents --plot FILE.svg`; `--demo` is always given. Both engines have the same
small cache of their own, a tenth larger than the demo's capacity, so that working sets beyond it are computed again
where no pool lies behind it.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from forebay.compare import cli
from forebay.compare.workload import DEMO_DOCUMENTS
from rig import models
from rig.daemon import Daemon
from rig.engine import EngineConfig
from rig.server import Server

BLOCK = 128
CONFIG = EngineConfig(
    models.LLAMA,
    block_size=BLOCK,
    blocks=DEMO_DOCUMENTS.capacity_tokens * 11 // 10 // BLOCK,
    max_model_len=4096,
    max_batched_tokens=4096,
)
POOL_BYTES = 1 << 30


def main() -> int:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-compare-")))
        daemon = stack.enter_context(Daemon(POOL_BYTES)).start()
        with_forebay = stack.enter_context(Server(CONFIG, directory, daemon.connector(), "with"))
        without = stack.enter_context(Server(CONFIG, directory, None, "without"))
        urls = [f"http://127.0.0.1:{server.ready().port}" for server in (with_forebay, without)]
        return cli.main([urls[0], "--baseline", urls[1], "--demo", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
