"""What the pages print for a shell, for Python and for the configuration runs, in their order and as it is printed.

`reader.py` says what is put in the place of a reader's own words, and lists what does not run here, with its reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fences import Fence, commands, fences, pages
from reader import ENDLESS, NOT_RUN, PAGES, READ, RUN, parts, reason
from rig.engine import clean_env
from rig.paths import CACHE, forebay_binary

HERE = Path(__file__).parent


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "# all\nmake x   # now\nrun --a \\\n  --b\nsay 'a\nb'\n(umask 077 && go) &"
    assert commands(Fence("page", 1, "sh", text)) == [
        "make x",
        "run --a \\\n  --b",
        "say 'a\nb'",
        "(umask 077 && go) &",
    ]


def test_each_fence_says_what_it_is_and_each_page_with_something_to_run_is_read() -> None:
    for page in pages():
        kinds = {fence.kind for fence in fences(page)}
        assert kinds <= RUN | READ.keys(), f"{page} has a fence of a kind that reader.py does not know: {kinds}"
        assert page in PAGES or not kinds & RUN, f"{page} has something to run, and reader.py does not read it"


def test_what_is_listed_as_not_run_or_endless_is_on_its_page() -> None:
    printed = [(page, part) for page in PAGES for fence in fences(page) if fence.kind in RUN for part in parts(fence)]
    assert {entry for page, part in printed if (entry := reason(page, part))} == set(NOT_RUN)
    assert ENDLESS <= set(printed)


def test_a_new_user_can_do_what_the_pages_print(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "forebay").symlink_to(forebay_binary().resolve())
    (tools / "redis-server").symlink_to(CACHE / "servers/bin/redis-server")
    root = tmp_path / "root"
    root.mkdir()
    env = clean_env() | {
        "PATH": f"{tools}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
    }
    env.pop("XDG_RUNTIME_DIR", None)
    argv = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--fork", "--kill-child"]
    argv += [str(HERE / "world.sh"), str(root), sys.executable, str(HERE / "reader.py")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
