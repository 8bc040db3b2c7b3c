"""The relay on Ray Serve: it places, restarts, scales and upgrades; slots, keys and messages are the relay's own."""

from typing import TYPE_CHECKING

from relaygr.lazy import lazily

if TYPE_CHECKING:
    from relaygr.cluster.ray.application import app
else:
    __getattr__ = lazily(__name__, {"app": "relaygr.cluster.ray.application"})  # what needs no Ray does without

__all__ = ["app"]
