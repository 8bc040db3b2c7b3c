"""`python -m relaygr` is the `relaygr` command."""

from relaygr.cli import app

app()
