"""Waiting for what cannot be stopped."""

import asyncio
from typing import Any

__all__ = ["until_done"]


async def until_done(future: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait until it has ended, however, though whoever waits is cancelled. Returns the cancellation, to be raised."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
