"""`python -m forebay.compare`."""

import sys

from forebay.compare.cli import main

if __name__ == "__main__":
    sys.exit(main())
