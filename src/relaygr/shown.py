"""Values in sentences for people."""

import json
from typing import Final

__all__ = ["shown"]

LONGEST: Final = 200
"""Characters of a value that are shown."""


def shown(value: object) -> str:
    """A value as whoever gave it writes it, in a settings file or in JSON; cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
