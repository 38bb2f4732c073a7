"""`python -m autoconv` is the command `autoconv`."""

import sys

from autoconv.cli import main

if __name__ == "__main__":
    sys.exit(main())
