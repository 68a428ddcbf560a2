"""The demo: the main job, end to end, on SQLite in a folder of its own, with real worker processes.

Eight orders are worked on by two workers. One order fails at first and is retried. One worker is killed with SIGKILL in
the middle of its work; its lease lapses and the other worker takes the work over. Beside the orders runs a flow: one of
its branches fails, two of three are enough to go on, and its last step waits for somebody to say yes. What the summary
claims was checked: the exit code is 0 only when all of it held.
"""

from __future__ import annotations


def run_demo(*, json: bool = False) -> int:
    """Perform the demo on the terminal, or line by line where there is none; the exit code.

    With `json` what was claimed and held is one document on stdout, and the play is on stderr. Ctrl-C ends the workers,
    too, and leaves nothing behind.
    """
    import asyncio

    import msgspec

    from flowfabric.demo.scenario import run_scenario
    from flowfabric.demo.screen import Screen

    screen = Screen(aside=json)
    try:
        code = asyncio.run(run_scenario(screen))
    except KeyboardInterrupt:
        screen.print_event("stopped")
        return 130
    if json:
        told = {"proven": code == 0, "claims": screen.claims}
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    return code
