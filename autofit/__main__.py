"""``python -m autofit`` is the command ``autofit``."""

import sys

from autofit.cli import main

if __name__ == "__main__":
    sys.exit(main())
