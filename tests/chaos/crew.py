"""Starting workers, listening to what they say, and killing them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.postgres_install import ROOT


class Hand:
    """One worker process, and everything that it said."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.chaos.worker", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: list[list[str]] = []
        self.complaints: list[str] = []
        self._ears = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._listen_to_complaints, daemon=True),
        ]
        for ear in self._ears:
            ear.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # a killed process may stop in the middle of a word
                self.said.append(line.split())

    def _listen_to_complaints(self) -> None:
        assert self.process.stderr is not None
        self.complaints += self.process.stderr

    def heard(self, word: str) -> list[list[str]]:
        """What it said of one kind, without the word itself."""
        return [words[1:] for words in tuple(self.said) if words[0] == word]

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for something that this worker brings about."""
        limit = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() in (None, 0), f"the worker ended: {''.join(self.complaints)}"
            assert time.monotonic() < limit, f"waited {seconds} s; it said {self.said[-5:]}"
            time.sleep(0.005)

    def kill(self) -> None:
        """End it at once, wherever it is."""
        self.process.send_signal(signal.SIGKILL)
        self.join()

    def join(self, seconds: float = 120) -> int:
        """Wait until it has ended and was heard to the end."""
        code = self.process.wait(seconds)
        for ear in self._ears:
            ear.join(10)
        return code


@contextmanager
def crew() -> Iterator[Callable[..., Hand]]:
    """Hands that are gone at the end, whatever happened."""
    hands: list[Hand] = []

    def hire(*arguments: object) -> Hand:
        hands.append(Hand(*arguments))
        return hands[-1]

    try:
        yield hire
    finally:
        for hand in hands:
            with suppress(ProcessLookupError):
                hand.process.kill()
            hand.join()
            for pipe in (hand.process.stdout, hand.process.stderr):
                if pipe is not None:
                    pipe.close()
