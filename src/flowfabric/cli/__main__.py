"""`python -m flowfabric.cli`."""

from flowfabric.cli import main

main()
