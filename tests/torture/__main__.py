"""`python -m torture [--seconds 3600] [--seed N]`, with PYTHONPATH=tests and a built `forebay`: see host.py.

`--sabotage` does harm that the torture has to notice, to show that it would.
"""

from __future__ import annotations

import argparse
import random
import sys

from torture.host import SABOTAGES, Failure, Host


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--sabotage", choices=SABOTAGES, default="")
    said = parser.parse_args()
    print(f"seed {said.seed}; it decides what is done, not when the machine runs whom", flush=True)
    try:
        Host(said.seed, said.seconds, said.sabotage).run()
    except Failure as failure:
        print(f"failed, seed {said.seed}:\n{failure}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
