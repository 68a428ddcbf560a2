"""The demo: retries, a worker crash, a flow and an approval, on SQLite in a temporary folder with real processes.

Two workers run eight orders. One order fails at first and is retried. One worker is killed with SIGKILL during its
work; its lease expires and the other worker claims the order. A flow runs beside the orders: one of its branches fails,
two of three are enough to continue, and its last step waits for an approval. Every claim in the summary is checked: the
exit code is 0 only if all of them hold.
"""

from __future__ import annotations


def run_demo(*, json: bool = False, console_port: int | None = None) -> int:
    """Run the demo with a live table on a terminal, or line by line elsewhere; return the exit code.

    With `json` the checked claims are printed as one document on stdout, and the events on stderr. With `console_port`
    the console shows at the end what was done, until Ctrl-C. Ctrl-C also ends the workers, and leaves nothing behind.
    """
    import asyncio

    import msgspec

    from flowfabric.demo.scenario import run_scenario
    from flowfabric.demo.screen import Screen

    screen = Screen(aside=json)
    try:
        code = asyncio.run(run_scenario(screen, console_port))
    except KeyboardInterrupt:
        screen.print_event("stopped")
        return 130
    if json:
        document = {"proven": code == 0, "claims": screen.claims}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    return code
