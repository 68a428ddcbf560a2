"""`python -m flowfabric.demo`."""

import sys

from flowfabric.demo import run_demo

sys.exit(run_demo())
