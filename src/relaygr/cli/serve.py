"""`relaygr serve`: gateway, instances, or all of them; with Ray, too."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from relaygr.cli.output import errors
from relaygr.errors import Unavailable
from relaygr.serving.all import DEFAULTS, run_all
from relaygr.serving.modes import Mode
from relaygr.serving.parent import end_with
from relaygr.serving.run import run, run_gateway, run_instance
from relaygr.serving.settings import Overrides, Settings, read

__all__ = ["serve"]

_SETTINGS = Settings()
serve = typer.Typer(help="Run the servers.", no_args_is_help=True)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The settings; see `relaygr config`. Options come before the file."),
]
Store = Annotated[str | None, typer.Option(help="The history store: a folder, or redis://host:6379/0.")]


def _host(default: str) -> Any:
    return typer.Option(help="The address to listen on.", show_default=default)


def _port(default: int) -> Any:
    return typer.Option(min=0, max=65535, help="The port; 0 takes a free one.", show_default=str(default))


def _device(default: str) -> Any:
    return typer.Option(help="Where the model runs: cpu, cuda, cuda:1 …", show_default=default)


@serve.command("all")
def serve_all(
    file: ConfigFile = None,
    host: Annotated[str | None, _host(DEFAULTS.gateway.host)] = None,
    port: Annotated[int | None, _port(DEFAULTS.gateway.port)] = None,
    instances: Annotated[int, typer.Option(min=1, help="Instances to run.")] = 2,
    data_dir: Annotated[
        Path, typer.Option(help="Where model, items and histories are kept; filled on first use.")
    ] = Path("relaygr-data"),
    device: Annotated[str | None, _device(DEFAULTS.engine.device)] = None,
    ranking_budget_ms: Annotated[
        float | None, typer.Option(help="Time a rank may take.", show_default=f"{DEFAULTS.cascade.ranking_ms:g}")
    ] = None,
    pipeline_budget_ms: Annotated[
        float | None, typer.Option(help="Time a request may take.", show_default=f"{DEFAULTS.cascade.pipeline_ms:g}")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="What the relay does.", show_default=DEFAULTS.relay.mode.value)
    ] = None,
) -> None:
    """Run a gateway and its instances on this machine, in one command.

    `POST /v1/recommend {"user": "user-5", "k": 10}` runs the whole cascade; `POST /v1/behaviours` appends what a user
    did. The first call puts the default model, a small one trained on MovieLens, its films and users into the folder.
    Ctrl-C stops everything.
    """
    given: Overrides = {
        "relay": {"mode": mode},
        "gateway": {"host": host, "port": port},
        "engine": {"device": device},
        "cascade": {"ranking_budget_ms": ranking_budget_ms, "pipeline_budget_ms": pipeline_budget_ms},
    }
    with errors("serve all"), Console(stderr=True).status("starting") as status:

        def ready(address: str) -> None:
            status.stop()
            typer.echo(f"gateway serves on {address}")

        settings = read(file, given, DEFAULTS)
        run(run_all(settings, data_dir, instances, ready, lambda what: status.update(what)))


@serve.command()
def gateway(
    file: ConfigFile = None,
    host: Annotated[str | None, _host(_SETTINGS.gateway.host)] = None,
    port: Annotated[int | None, _port(_SETTINGS.gateway.port)] = None,
    store: Store = None,
    catalogue: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The items that can be recommended.")
    ] = None,
) -> None:
    """Serve the cascade over instances that run already.

    The file names them, each slot with its address, under `[gateway.instances]`; they are probed, and used once they
    answer. `POST /v1/recommend` and `POST /v1/behaviours` are its calls. SIGTERM drains it.
    """
    given: Overrides = {
        "gateway": {"host": host, "port": port},
        "data": {"store": store, "catalogue": _path(catalogue)},
    }
    with errors("serve gateway"):
        run(run_gateway(read(file, given), lambda address: typer.echo(f"gateway serves on {address}")))


@serve.command()
def instance(
    file: ConfigFile = None,
    model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The checkpoint to serve; here or in the file.")
    ] = None,
    slot: Annotated[
        str | None,
        typer.Option(help="Its stable name, the same after a restart.", show_default=_SETTINGS.instance.slot),
    ] = None,
    host: Annotated[str | None, _host(_SETTINGS.instance.host)] = None,
    port: Annotated[int | None, _port(_SETTINGS.instance.port)] = None,
    store: Store = None,
    device: Annotated[str | None, _device(_SETTINGS.engine.device)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True, help="Who started it: it ends with them.")] = None,
) -> None:
    """Serve one model: an engine process behind HTTP.

    `POST /v1/pre-infer` makes a history's prefix ready and answers at admission; `POST /v1/rank` scores candidates on a
    history, whatever is cached. `GET /v1/status`, `/healthz` and `/readyz` tell how it is. SIGTERM drains it.
    """
    given: Overrides = {
        "instance": {"slot": slot, "host": host, "port": port},
        "engine": {"device": device},
        "data": {"model": _path(model), "store": store},
    }
    with errors("serve instance"):
        if parent is not None:
            end_with(parent)
        settings = read(file, given)
        name = settings.instance.slot
        run(run_instance(settings, lambda address: typer.echo(f"{name} serves on {address}")))


@serve.command("ray")
def serve_ray(
    file: ConfigFile = None,
    address: Annotated[
        str | None,
        typer.Option(help="A Ray cluster that runs, or `auto`; what it serves is upgraded. None: one is started here."),
    ] = None,
    host: Annotated[str | None, _host(_SETTINGS.gateway.host)] = None,
    port: Annotated[int | None, _port(_SETTINGS.gateway.port)] = None,
    instances: Annotated[
        int | None,
        typer.Option(min=1, help="Instances to begin with.", show_default=str(_SETTINGS.ray.instances)),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where the default model, its items and histories are kept; for what the file names none."),
    ] = None,
    device: Annotated[str | None, _device(_SETTINGS.engine.device)] = None,
) -> None:
    """Run gateways and instances with Ray Serve: on many machines, restarted, scaled and upgraded by it.

    Needs `pip install 'relaygr[ray]'`. Section `[ray]` of the file says how many of what, and docs/ray.md how it is
    operated. Without `--address` Ray is started on this machine, and Ctrl-C stops everything. With it the command
    returns once the application is healthy; calling it again with another model upgrades one instance after the other.
    """
    given: Overrides = {
        "gateway": {"host": host, "port": port},
        "engine": {"device": device},
        "ray": {"instances": instances},
    }
    with errors("serve ray"), Console(stderr=True).status("starting") as status:
        try:
            from relaygr.cluster.ray.run import run_ray
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "ray":
                raise
            raise Unavailable("Ray is not installed: pip install 'relaygr[ray]'") from error

        def ready(where: str) -> None:
            status.stop()
            typer.echo(f"gateway serves on {where}")

        def progress(what: str) -> None:
            status.update(what)

        run_ray(read(file, given), address=address, data=data_dir, ready=ready, progress=progress)


def _path(given: Path | None) -> str | None:
    return None if given is None else str(given)
