"""What becomes of an engine whose own code fails: it answers nobody any more, rather than wrongly or never."""

from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec

from relaygr.errors import Unavailable

__all__ = ["FAILED", "Guard"]

P = ParamSpec("P")

FAILED = "the engine has failed; the log says how"


class Guard:
    """Stands around all that changes what an engine keeps.

    An exception there is a fault of the engine's own, and what it keeps may be changed by half: scores made from that
    could be wrong. So the first one ends it. `failed` hears of it, and nothing behind the guard runs again.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.error: Exception | None = None
        self._failed = failed

    def __enter__(self) -> None:
        """For calls that somebody waits for: what fails raises Unavailable."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._fail(error)
            raise Unavailable(FAILED) from error

    def callback(self, call: Callable[P, None]) -> Callable[P, None]:
        """For calls that nobody waits for: what fails raises nothing, and then nothing is called any more."""

        def guarded(*args: P.args, **more: P.kwargs) -> None:
            if self.error is None:
                try:
                    call(*args, **more)
                except Exception as error:
                    self._fail(error)

        return guarded

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._failed(error)
