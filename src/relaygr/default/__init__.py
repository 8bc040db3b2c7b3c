"""The default model: small, trained on MovieLens latest-small, with its items, their titles, and users' histories.

`card.md` says what it is and how good. Everything in this folder that is not Python was made from MovieLens and stands
under the terms in LICENCE.txt, which come with the data: no commercial use without permission, the same terms for
whoever it is passed on to.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from relaygr.cascade.catalogue import Catalogue
from relaygr.history import History

__all__ = ["ACTIONS", "CARD", "ITEMS", "LICENCE", "MODEL", "catalogue", "histories", "save_histories"]

MODEL: Final = Path(__file__).parent / "model.safetensors"
"""The checkpoint that instances serve."""
CARD: Final = MODEL.with_name("card.md")
LICENCE: Final = MODEL.with_name("LICENCE.txt")
"""The terms that the data come with."""
ITEMS: Final = 9066
ACTIONS: Final = 10
"""An action is a rating in half stars: 0 is half a star, 9 is five."""
_HISTORIES: Final = MODEL.with_name("histories.safetensors")


def catalogue() -> Catalogue:
    """The films: titles, and the directions of their embeddings in the model, which retrieval searches."""
    table = load_file(MODEL)["embedding.table"][:ITEMS]
    titles = json.loads(load_file(_HISTORIES)["titles"].tobytes())
    return Catalogue(np.arange(ITEMS), table, titles)


def histories() -> list[History]:
    """What the users of the data rated, each oldest first."""
    stored = load_file(_HISTORIES)
    ends = np.cumsum(stored["lengths"])[:-1]
    columns = (np.split(stored[name], ends) for name in ("items", "actions", "timestamps"))
    return [History(*own) for own in zip(*columns, strict=True)]


def save_histories(users: list[History], titles: list[str]) -> None:
    """Write what `histories` and `catalogue` read; for whoever makes another default model."""
    columns: dict[str, npt.NDArray[Any]] = {
        "items": np.concatenate([history.items for history in users]).astype(np.int16),
        "actions": np.concatenate([history.actions for history in users]).astype(np.int8),
        "timestamps": np.concatenate([history.timestamps for history in users]).astype(np.int32),
        "lengths": np.array([len(history) for history in users], np.int32),
        "titles": np.frombuffer(json.dumps(titles, ensure_ascii=False).encode(), np.uint8),
    }
    save_file(columns, _HISTORIES)
