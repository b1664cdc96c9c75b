"""`python -m tierplan`: the command, where its script is not on the path."""

import sys

from tierplan.cli import main

sys.exit(main())
