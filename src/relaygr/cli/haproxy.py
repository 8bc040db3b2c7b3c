"""`relaygr haproxy`: a load balancer's configuration."""

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.output import errors

__all__ = ["haproxy"]


def haproxy(
    file: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="The settings; `[gateway.instances]` names the slots.")
    ],
    bind: Annotated[str, typer.Option(help="The address and port that HAProxy listens on.")] = "127.0.0.1:8200",
    socket: Annotated[
        Path | None, typer.Option(help="A local socket for commands to HAProxy; none by default.")
    ] = None,
) -> None:
    """Print a configuration of HAProxy for the instances that the file names, for cascades of your own.

    Senders give the user in `x-relaygr-key`: a user's signal and rank meet at one instance, by consistent hashing with
    bounded load, and for as long as a lease. `relaygr haproxy --config relaygr.toml > haproxy.cfg`, then
    `haproxy -c -f haproxy.cfg` to check it and `haproxy -f haproxy.cfg` to run it.
    """
    with errors("haproxy"):
        from relaygr.cluster.haproxy import HaproxyConfig
        from relaygr.cluster.haproxy import haproxy as render
        from relaygr.relay import Membership
        from relaygr.serving.settings import read

        settings = read(file)
        membership = Membership()
        for slot, address in settings.gateway.instances.items():
            membership.add(slot, address)
        config = HaproxyConfig(
            bind=bind,
            lease_s=settings.engine.lease_s,
            load_factor=settings.router.load_factor,
            socket=None if socket is None else str(socket),
        )
        typer.echo(render(membership, config), nl=False)
