"""What commands of the lab have in common: options of traffic and of the engine, each defined here alone."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from relaygr.lab.chains import Arrivals as ArrivalsName
from relaygr.lab.recorded import Recorded as RecordedUsers
from relaygr.lab.recorded import stored_lengths
from relaygr.lab.workload import RECORDED, STORE, Workload
from relaygr.lab.workload import Profile as ProfileName

if TYPE_CHECKING:
    from relaygr.lab.bench import Bench
    from relaygr.serving.modes import Mode

__all__ = [
    "Arrivals", "AsJson", "Candidates", "DType", "DeviceCache", "DeviceName", "GapS", "HostCache", "Lengths", "Longest",
    "Model", "Modes", "New", "PastS", "PipelineMs", "PreProcessingMs", "Profile", "RankingMs", "Recorded",
    "RetrievalMs", "Reuse", "Seed", "Served", "Shape", "Skew", "StageSpread", "advance", "modes", "with_own",
]  # fmt: skip

# Traffic.
Profile = Annotated[ProfileName, typer.Option(help="How users come back.")]
Reuse = Annotated[float, typer.Option(help="Profile reuse: the share of requests by users who return.")]
GapS = Annotated[float, typer.Option(help="Profile reuse: seconds between a user's requests.")]
Skew = Annotated[float, typer.Option(help="Profile reuse: how unlike users are; 0: all alike.")]
Recorded = Annotated[
    Path | None,
    typer.Option(
        help="Users as they came, in place of a profile: a CSV or Parquet file, one row for each request, columns user "
        "and at (seconds, or a date and time), and length (behaviours of the user then) if known."
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        help="Behaviours of users: kuairand-1k, ml-1m, a number, two (1024+32768@0.2), recorded (the column length of "
        "--recorded), or those of a store's users: store:FOLDER, store:redis://host:6379/0. Not given: recorded where "
        "there is such a column.",
    ),
]
Longest = Annotated[int, typer.Option(help="Longer histories are cut to this.")]
New = Annotated[float, typer.Option(help="Behaviours between two requests of a user, on average.")]
Candidates = Annotated[int, typer.Option(help="Items to rank.")]
RetrievalMs = Annotated[float | None, typer.Option(help="Retrieval takes this long, in the middle.")]
PreProcessingMs = Annotated[float | None, typer.Option(help="Pre-processing takes this long, in the middle.")]
StageSpread = Annotated[float, typer.Option(help="One in a hundred takes so many times as long, in either stage.")]
Arrivals = Annotated[ArrivalsName, typer.Option(help="Users come at any time, or evenly.")]
PastS = Annotated[
    float, typer.Option(help="Seconds of the past that servers may have kept something of: twice users' gaps or more.")
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed draws the same requests.")]

# What serves it.
Shape = Annotated[str, typer.Option(help="Random weights of a named shape: d64, d256, d512, d1024, dlrmv3.")]
Model = Annotated[Path | None, typer.Option(help="A checkpoint, model.safetensors, in place of a shape.")]
DeviceName = Annotated[str, typer.Option("--device", help="cpu, cuda …")]
DType = Annotated[str, typer.Option(help="float32, bfloat16, float16.")]
DeviceCache = Annotated[str, typer.Option(help="Memory for prefixes on the device: 60GiB, or on a GPU 80%.")]
HostCache = Annotated[str, typer.Option(help="Memory for prefixes on the host.")]
RankingMs = Annotated[float, typer.Option(min=0.001, help="What ranking may take.")]
PipelineMs = Annotated[float, typer.Option(min=0.001, help="What a request may take in all.")]
Modes = Annotated[list[str] | None, typer.Option("--mode", help="Once for each; not given: full, cache and the relay.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what came out as JSON, for machines.")]


@dataclass(frozen=True)
class Served:
    """By which model, where, and with how much memory."""

    shape: str
    model: Path | None
    device: str
    dtype: str
    device_cache: str
    host_cache: str

    def bench(self, longest: int) -> "Bench":
        """For histories up to this length."""
        from relaygr.config import EngineConfig
        from relaygr.lab.bench import Bench
        from relaygr.lab.shapes import shaped
        from relaygr.model import checkpoint

        config = EngineConfig(
            device=self.device, dtype=self.dtype, device_cache=self.device_cache, host_cache=self.host_cache,
            max_history=longest,
        )  # fmt: skip
        if self.device == "cpu":
            import torch

            torch.set_num_threads(1)  # the loop needs a core, too
        return Bench(checkpoint.load(self.model) if self.model is not None else shaped(self.shape), config)

    @functools.cached_property
    def name(self) -> str:
        """Another one for whatever serves otherwise: a checkpoint is known by its contents."""
        model = self.shape
        if self.model is not None:
            with self.model.open("rb") as file:
                model = f"{self.model.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
        return f"{model} on {self.device} in {self.dtype}, {self.device_cache} and {self.host_cache}"


def with_own(workload: Workload, recorded: Path | None, lengths: str | None) -> Workload:
    """With what one brings along: recorded users, and the lengths that were asked for, or the recorded ones."""
    users = None if recorded is None else RecordedUsers.read(recorded)
    if lengths is None:
        lengths = RECORDED if users is not None and users.lengths is not None else workload.lengths
    kind, named, store = lengths.partition(":")
    if kind == STORE and named:
        # Known by what is in it, as recorded ones are: not by its name, nor by a password in it.
        return replace(workload, recorded=users, lengths=STORE, stored=stored_lengths(store))
    return replace(workload, recorded=users, lengths=lengths)


def modes(names: list[str] | None) -> "list[Mode]":
    """Those of these names; not given, the three that are compared."""
    from relaygr.errors import InvalidInput
    from relaygr.serving.modes import COMPARED, Mode

    unknown = [name for name in names or () if name not in list(Mode)]
    if unknown:
        raise InvalidInput("mode", f"is {unknown[0]!r}; choose from {', '.join(Mode)}")
    return [Mode(name) for name in names or COMPARED]


def advance(bar: Progress, task: TaskID) -> Callable[[int, int], None]:
    """What is told how many of how many are done, and shows it."""
    return lambda done, of: bar.update(task, completed=done)
