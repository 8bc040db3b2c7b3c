"""`relaygr lab run`: what really happens, in process or over HTTP."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from relaygr.bars import progress_bar
from relaygr.cli import lab_options as options
from relaygr.cli.lab_told import rows
from relaygr.cli.output import errors
from relaygr.lab.workload import Workload

__all__ = ["run"]


def run(
    trace: Annotated[Path, typer.Argument(help="A trace of relaygr lab workload.")],
    out: Annotated[Path, typer.Argument(help="The records to write, a Parquet file: one row for each request.")],
    url: Annotated[
        str | None, typer.Option(help="A gateway to send to, such as http://127.0.0.1:8000; not given: in process.")
    ] = None,
    name: Annotated[str, typer.Option(help="Over HTTP: what users are called, with a number behind.")] = "lab",
    mode: Annotated[
        str, typer.Option(help="The mode to serve in; over HTTP, the mode that the servers are in.")
    ] = "relay+host+extend",
    shape: options.Shape = "d64",
    model: options.Model = None,
    device: options.DeviceName = "cpu",
    dtype: options.DType = "float32",
    device_cache: options.DeviceCache = "512MiB",
    host_cache: options.HostCache = "512MiB",
    ranking_ms: options.RankingMs = 50.0,
    pipeline_ms: options.PipelineMs = 200.0,
    check: Annotated[
        int,
        typer.Option(min=0, help="About how many answers are checked against full inference; over HTTP: of --model."),
    ] = 8,
    as_json: options.AsJson = False,
) -> None:
    """Send a trace's requests at their times, whatever the answers do, and write what became of each.

    Latency counts from when a request was to be sent. The past of the trace is sent, too, and not counted. In process,
    the engine, the trigger and admission are real, and the stages before ranking take what the trace says; over HTTP,
    a gateway and its instances serve, and stages take what they take. A sample of scores is checked.
    """
    from relaygr.lab.histories import Histories
    from relaygr.lab.outcome import Budgets, Run
    from relaygr.lab.outputs import checked_file
    from relaygr.lab.records import save_records
    from relaygr.lab.run import Sample
    from relaygr.lab.trace import Trace

    with errors("lab run"):
        checked_file("records", out)
        chosen, requests = options.modes([mode])[0], Trace.load(trace)
        budgets = Budgets(ranking_ms, pipeline_ms)
        longest = int(requests.length.max(initial=1))
        served = options.Served(shape, model, device, dtype, device_cache, host_cache)
        samples: list[Sample] = []

        async def in_process(bar: Progress) -> tuple[Run, dict[str, Any] | None]:
            task = bar.add_task(chosen.value, total=len(requests))
            async with served.bench(longest) as bench:
                sent = Workload(1.0, 1.0, candidates=int(requests.candidates.max(initial=1)))
                probe = (await bench.measure()).probe(chosen, sent, budgets, longest)
                found = await bench.run(probe, options.advance(bar, task), sampled=check, trace=requests)
                return found, await asyncio.to_thread(bench.check) if bench.samples else None

        async def over_http(bar: Progress, address: str) -> tuple[Run, dict[str, Any] | None]:
            from relaygr.lab.oracle import check as compare
            from relaygr.lab.over_http import replay_over_http
            from relaygr.model import checkpoint

            task = bar.add_task(address, total=len(requests))
            loaded = checkpoint.load(model) if model is not None else None
            items = loaded.config.items if loaded is not None else 1000
            found = await replay_over_http(
                address, requests, chosen, Histories(items, 2), name,
                lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
                samples, check if loaded is not None else 0,
            )  # fmt: skip
            if loaded is None or not samples:
                return found, None
            checked = await asyncio.to_thread(compare, loaded, samples, "cpu", dtype)
            return found, asdict(checked) | {"holds": checked.holds}

        with progress_bar() as bar:
            found, checked = asyncio.run(in_process(bar) if url is None else over_http(bar, url))
        told = found.told(budgets) | {"budgets_ms": [ranking_ms, pipeline_ms], "oracle": checked}
        save_records(out, found.records, told | {"trace": requests.made})
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table(box=None, show_header=False)
    table.add_row("mode", chosen.value)
    for key, cells in rows([told]):
        table.add_row(key, *cells)
    Console().print(table)
