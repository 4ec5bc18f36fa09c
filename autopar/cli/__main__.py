"""`python -m autopar.cli` is the console script."""

import sys

from autopar.cli.main import main

sys.exit(main())
