"""The errors a caller can meet. Everything raised on purpose is a RelayError."""

__all__ = ["DeadlineExceeded", "HistoryNeeded", "InvalidInput", "Overloaded", "RelayError", "Unavailable"]


class RelayError(Exception):
    """Base of every error RelayGR raises on purpose."""


class InvalidInput(RelayError, ValueError):
    """The caller's input is wrong. The message starts with the name of the offending field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type["InvalidInput"], tuple[str, str]]:
        return (InvalidInput, (self.field, self.problem))


class Overloaded(RelayError):
    """More work than can be taken now; try again later."""


class DeadlineExceeded(RelayError):
    """The answer could not be there by the deadline."""


class Unavailable(RelayError):
    """The part that should answer is closed, closing, or gone."""


class HistoryNeeded(RelayError):
    """A history was given by its digest alone, and its prefix is not cached: give the behaviours."""
