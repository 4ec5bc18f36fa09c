"""`python -m autopar`, which torchrun can start, is the console script."""

import sys

from autopar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
