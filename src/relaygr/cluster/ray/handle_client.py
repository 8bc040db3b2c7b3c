"""Messages to instances as calls of Ray Serve: what HTTP carries, by a deployment's handle."""

import asyncio
import contextvars
from collections.abc import Mapping
from typing import Any, Final

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from relaygr.cluster.ray.slot_router import AVOID, SLOT
from relaygr.errors import Unavailable
from relaygr.serving.client import Response

__all__ = ["HandleClient"]

TRIES: Final = 4
"""As many slots as a message is offered, where one after the other drains or dies."""


class HandleClient:
    """Requests to the instances of a deployment, each where Serve's router sends it: by `x-relaygr-key`, or to the slot
    that `x-relaygr-slot` names while it lives.

    Signals and ranks may be sent twice, what is computed does not depend on it: so a replica that died or drains costs
    another try elsewhere and not the request. Raises Unavailable when there is none.
    """

    def __init__(self, handle: Any, slot: str | None = None) -> None:
        """`slot`: where every request goes that names none itself."""
        self._call = handle.call
        self.slot = slot

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        """One exchange. Cancelled with its caller."""
        sent = dict(headers or {})
        if self.slot is not None:
            sent.setdefault(SLOT, self.slot)
        refused: list[str] = []
        response: Response | None = None
        for _ in range(TRIES):
            try:
                response = await self._once(method, path, sent, body)
            except RayActorError as error:
                sent.pop(SLOT, None)
                failure = error
                continue
            except (BackPressureError, DeploymentUnavailableError) as error:
                raise Unavailable(f"Serve has no instance for it: {error}") from error
            except (RayError, RayServeException) as error:
                raise Unavailable(f"a call by Serve failed: {error}") from error
            if response.status != 503 or self.slot is not None:
                return response
            sent.pop(SLOT, None)
            refused.append(response.headers.get(SLOT, ""))
            sent[AVOID] = ",".join(filter(None, refused))
        if response is not None:
            return response
        raise Unavailable(f"replicas died: {failure}") from failure

    async def _once(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """By a task without the caller's context. Serve takes concurrent calls from inside one of its requests for one
        and the same, and answers one of them; these are calls of their own."""
        task = asyncio.get_running_loop().create_task(
            self._ask(method, path, headers, body), context=contextvars.Context()
        )
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        answer = self._call.remote(method, path, headers=dict(headers), body=body)
        return Response(*await answer)

    def close(self) -> None:
        """Nothing is kept open here: the handle is Serve's."""
