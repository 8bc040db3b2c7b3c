"""The tables of docs/metrics.md: `python -m relaygr.serving.metrics_page` prints them."""

import sys
from collections.abc import Sequence
from typing import Any

from relaygr.serving.gateway_metrics import GATEWAY
from relaygr.serving.instance_metrics import INSTANCE
from relaygr.serving.metrics import HTTP, Metric

__all__ = ["markdown"]


def markdown() -> str:
    """The tables of docs/metrics.md."""
    own = (("Instance", INSTANCE), ("Gateway", GATEWAY))
    sections = [_section("Both", HTTP), *(_section(title, table[len(HTTP) :]) for title, table in own)]
    return "\n".join(sections)


def _section(title: str, table: Sequence[Metric[Any]]) -> str:
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |" for m in table]
    return "\n".join((f"## {title}\n", "| metric | kind | labels | what |", "|---|---|---|---|", *rows, ""))


if __name__ == "__main__":
    sys.stdout.write(markdown())
