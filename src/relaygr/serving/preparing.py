"""How far an engine has prepared its device, shown to whoever started it."""

import sys
import threading
import time

from rich.console import Console
from rich.progress import TaskID

from relaygr.bars import progress_bar

__all__ = ["Preparing"]


class Preparing:
    """A bar for each thing that is done, on stderr where that is a terminal; a line when it is done, everywhere.

    Called on any thread, with what is done, how much of it, and of how much.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._bar = progress_bar(self._console)
        self._lock = threading.Lock()
        self._tasks: dict[str, tuple[TaskID, float]] = {}
        """What is under way, and since when."""

    def __call__(self, what: str, done: int, of: int) -> None:
        with self._lock:
            if what not in self._tasks:
                if not self._tasks:
                    self._bar.start()
                self._tasks[what] = self._bar.add_task(what, total=of), time.monotonic()
            task, began = self._tasks[what]
            self._bar.update(task, completed=done, total=of)
            if done >= of:
                del self._tasks[what]
                self._bar.remove_task(task)
                if not self._tasks:
                    self._bar.stop()
                self._console.print(
                    f"relaygr engine: {of:,} {what} in {time.monotonic() - began:.1f} s", highlight=False
                )
                sys.stderr.flush()
