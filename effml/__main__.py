"""`python -m effml` is the `effml` command."""

import sys

from effml.cli import main

if __name__ == "__main__":
    sys.exit(main())
