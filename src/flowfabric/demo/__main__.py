"""`python -m flowfabric.demo`."""

import sys

from flowfabric.demo import play

sys.exit(play())
