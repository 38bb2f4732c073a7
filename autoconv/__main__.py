"""`python -m autoconv` is the command `autoconv`."""

import sys

from autoconv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
