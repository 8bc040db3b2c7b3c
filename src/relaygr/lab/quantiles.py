"""Facts about real traffic that are known by their quantiles."""

from typing import Final

from relaygr.history.quantiles import Quantiles

__all__ = ["GLOBO_GAPS", "GLOBO_SESSIONS", "LENGTHS"]

LENGTHS: Final = {
    "kuairand-1k": Quantiles(
        ((0.1, 1998), (0.5, 8327), (0.9, 24418), (0.99, 62626), (1.0, 127557)),
        "events of a user in all 11,713,045 rows of KuaiRand-1K (short video), by a public exploratory analysis",
    ),
    "ml-1m": Quantiles(
        ((0.5, 96), (0.9, 400), (0.99, 907), (1.0, 2314)),
        "ratings of a user in MovieLens-1M",
    ),
}
"""Behaviours of users, by name."""

_GLOBO: Final = (
    "2,988,181 clicks of 322,897 users of the news portal Globo.com, October 2017; the 54% of gaps that are exactly "
    "30.000 s, which were imputed, left out"
)
GLOBO_SESSIONS: Final = Quantiles(((0.5, 2), (0.75, 3), (0.9, 4), (0.95, 6), (0.99, 9)), _GLOBO)
"""Requests of a session."""
GLOBO_GAPS: Final = Quantiles(
    (
        (0.01, 1.16), (0.05, 8.47), (0.1, 20.9), (0.25, 70.0), (0.5, 163.3), (0.75, 388.8), (0.9, 1290.8),
        (0.95, 2714.4), (0.99, 12190.6),
    ),
    _GLOBO,
)  # fmt: skip
"""Seconds between two requests of a session."""
