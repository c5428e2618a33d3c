"""`python -m predmask` is `predmask`."""

import sys

from predmask.cli import main

sys.exit(main())
