"""What is said while the demo runs: a line for each event, and the state of things on the last line."""

from __future__ import annotations

import sys
import time

from .history import History
from .style import Style, letter

EVERY = 3.0  # seconds between two states where no line can be overwritten


class Progress:
    """Writes to the standard output."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self._began = self._shown = time.monotonic()

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._clear()
        elapsed = self.style.dim(f"{time.monotonic() - self._began:5.1f} s")
        print(f"{elapsed}  {text}", flush=True)

    def status(self, text: str) -> None:
        """Show a line until the next one comes."""
        if self.style.rich:
            self._clear()
            print(f"         {self.style.dim(text)}", end="", flush=True)

    def show(self, history: History) -> None:
        """Show the state of the play."""
        counts = [
            f"{len(history.runs):3} runs",
            f"{len(history.of('skip')):3} skipped",
            f"{len(history.of('retry')):3} retried",
            f"{len(history.open):3} under way",
        ]
        # Short, since a line that wraps can't be overwritten.
        running = "".join(self.style.block(run.tenant, letter(run.tenant)) for run in history.running)
        if self.style.rich:
            self._clear()
            print(f"         {self.style.dim('  '.join(counts))}  {running}", end="", flush=True)
        elif history.runs and time.monotonic() - self._shown > EVERY:
            self._shown = time.monotonic()
            self.say("  ".join(counts))

    def _clear(self) -> None:
        if self.style.rich:
            sys.stdout.write("\r\033[K")
