"""`python -m clearhead` is the command line."""

import sys

from clearhead.cli import main

sys.exit(main())
