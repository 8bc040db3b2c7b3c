"""`relaygr lab slo` and `length`: the highest rate, and the longest history, within the budgets."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
import typer

from relaygr.cli import lab_options as options
from relaygr.cli.lab_search import Search, tell
from relaygr.cli.output import errors, interrupted
from relaygr.errors import InvalidInput
from relaygr.lab.workload import STAGE_SPREAD, STAGES, Workload

if TYPE_CHECKING:
    from relaygr.lab.device import Device
    from relaygr.lab.outcome import Budgets
    from relaygr.lab.probe import Probe
    from relaygr.serving.modes import Mode

__all__ = ["EPILOG", "length", "slo"]

EPILOG: Final = (
    "Defaults are sized for a CPU. On a GPU: --device cuda --dtype bfloat16 --shape d512 (or your --model) "
    "--candidates 512 --device-cache 80% --host-cache 64GiB, and for slo --lengths 32768, or your own."
)
_DEFAULT: Final = Workload(1.0, 1.0, lengths="2048", candidates=64, past_s=16.0, stage_spread=STAGE_SPREAD)
_GRAIN: Final = 128
"""Lengths that are tried are multiples of it."""

Probes = Annotated[Path, typer.Argument(help="A file of probes, one JSON line each; what is in it is not run again.")]
Tries = Annotated[
    int,
    typer.Option(
        min=1,
        help="Steps of each mode's search at most, confirming among them. A step is a probe, or two where the first "
        "may have failed by luck; up to two half steps come on top. A probe is 5 to 30 s of traffic and some seconds "
        "of its past. With more tries the same command goes on.",
    ),
]


def slo(
    probes: Probes,
    profile: options.Profile = _DEFAULT.profile,
    reuse: options.Reuse = _DEFAULT.reuse,
    gap_s: options.GapS = _DEFAULT.gap_s,
    skew: options.Skew = _DEFAULT.skew,
    recorded: options.Recorded = None,
    lengths: options.Lengths = None,
    longest: options.Longest = _DEFAULT.longest,
    new: options.New = _DEFAULT.new,
    candidates: options.Candidates = _DEFAULT.candidates,
    retrieval_ms: options.RetrievalMs = None,
    pre_processing_ms: options.PreProcessingMs = None,
    stage_spread: options.StageSpread = _DEFAULT.stage_spread,
    arrivals: options.Arrivals = _DEFAULT.arrivals,
    past_s: options.PastS = _DEFAULT.past_s,
    seed: options.Seed = 0,
    mode: options.Modes = None,
    shape: options.Shape = "d64",
    model: options.Model = None,
    device: options.DeviceName = "cpu",
    dtype: options.DType = "float32",
    device_cache: options.DeviceCache = "512MiB",
    host_cache: options.HostCache = "512MiB",
    ranking_ms: options.RankingMs = 50.0,
    pipeline_ms: options.PipelineMs = 200.0,
    tries: Tries = 8,
    as_json: options.AsJson = False,
) -> None:
    """Find the highest rate at which P99 of ranking and pipeline hold and 99 of 100 requests are answered, by mode.

    The simulator, with costs measured here, says where to begin; then modes take turns on the real engine, and what is
    found is confirmed by another run. Each probe is a line of the file as soon as it is done: call it again, and it
    goes on where it was ended. The other modes are measured at the rate that the relay was found to hold.

    Traffic is that of `relaygr lab workload`, with the same options; the rate is what is searched. Lengths not given,
    nor recorded: 2048. Stage times not given: of what --pipeline-ms leaves beside --ranking-ms, retrieval takes 60% and
    pre-processing 20% in the middle (90 and 30 ms of 200 and 50). The relay works in that time: give yours.
    """
    from relaygr.lab.limits import guess_rate
    from relaygr.lab.outcome import Budgets

    with errors("lab slo"):
        budgets = Budgets(ranking_ms, pipeline_ms)
        base = options.with_own(
            Workload(
                1.0, 1.0, profile, reuse, gap_s, skew, _DEFAULT.lengths, longest, new, candidates,
                *_stages(budgets, retrieval_ms, pre_processing_ms), stage_spread, arrivals, past_s, seed,
            ),
            recorded,
            lengths,
        )  # fmt: skip
        middle, most = base.length_quantiles.at(np.array([0.5, 1.0])).tolist()
        most = min(round(most), longest)
        base = replace(base, longest=min(longest, most + max(1024, int(256 * new))))
        served = options.Served(shape, model, device, dtype, device_cache, host_cache)

        def at(known: "Device") -> "Callable[[Mode, float], Probe]":
            def probe(each: "Mode", rate: float) -> "Probe":
                return known.probe(each, base, budgets, most, served.name).at(rate=float(f"{rate:.3g}"))

            return probe

        def guess(known: "Device", each: "Mode") -> float:
            return guess_rate(known, at(known), each, middle, candidates, returning=base.returning)

        search = Search("rate", served, base, budgets, at, guess, tries)
        with interrupted("lab slo", probes):
            found, start = asyncio.run(search.run(probes, options.modes(mode)))
    tell(search, found, start, as_json)


def length(
    probes: Probes,
    longest: Annotated[int, typer.Option(min=128, help="The longest history tried.")] = 32_768,
    reuse: options.Reuse = 0.0,
    new: options.New = _DEFAULT.new,
    candidates: options.Candidates = _DEFAULT.candidates,
    retrieval_ms: options.RetrievalMs = None,
    pre_processing_ms: options.PreProcessingMs = None,
    stage_spread: options.StageSpread = _DEFAULT.stage_spread,
    seed: options.Seed = 0,
    mode: options.Modes = None,
    shape: options.Shape = "d64",
    model: options.Model = None,
    device: options.DeviceName = "cpu",
    dtype: options.DType = "float32",
    device_cache: options.DeviceCache = "512MiB",
    host_cache: options.HostCache = "512MiB",
    ranking_ms: options.RankingMs = 50.0,
    pipeline_ms: options.PipelineMs = 200.0,
    tries: Tries = 8,
    as_json: options.AsJson = False,
) -> None:
    """Find the longest history at which P99 of ranking and pipeline hold, one request at a time, by mode.

    Searched as by `relaygr lab slo`: the simulator says where to begin, modes take turns, each probe is kept. All users
    have histories of the length that is tried; those who return do so 2 s later on average. Stage times not given: of
    what --pipeline-ms leaves beside --ranking-ms, retrieval takes 60% and pre-processing 20% in the middle.
    """
    from relaygr.lab.limits import guess_length
    from relaygr.lab.outcome import Budgets

    with errors("lab length"):
        budgets = Budgets(ranking_ms, pipeline_ms)
        stages = _stages(budgets, retrieval_ms, pre_processing_ms)
        base = Workload(
            0.9e3 / pipeline_ms, 1.0, "reuse", reuse, gap_s=2.0, lengths=str(longest), new=new, candidates=candidates,
            longest=longest + max(1024, int(256 * new)), past_s=12.0, arrivals="even", retrieval_ms=stages[0],
            pre_processing_ms=stages[1], stage_spread=stage_spread, seed=seed,
        )  # fmt: skip
        served = options.Served(shape, model, device, dtype, device_cache, host_cache)

        def at(known: "Device") -> "Callable[[Mode, float], Probe]":
            def probe(each: "Mode", value: float) -> "Probe":
                tuned = known.probe(each, base, budgets, int(value), served.name, one_at_a_time=True)
                return tuned.at(length=max(_GRAIN, int(value) // _GRAIN * _GRAIN), requests=60)

            return probe

        def guess(known: "Device", each: "Mode") -> float:
            return guess_length(known, at(known), each, candidates, float(longest), returning=reuse > 0.5)

        search = Search("length", served, base, budgets, at, guess, tries, float(longest), float(_GRAIN))
        with interrupted("lab length", probes):
            found, start = asyncio.run(search.run(probes, options.modes(mode)))
    tell(search, found, start, as_json)


def _stages(budgets: "Budgets", *given: float | None) -> tuple[float, float]:
    """Milliseconds of retrieval and pre-processing; those not given, by their shares of what the budgets leave."""
    taken = [ms if ms is not None else share * budgets.lead_ms for ms, share in zip(given, STAGES, strict=True)]
    if sum(taken) >= budgets.pipeline_ms:
        raise InvalidInput(
            "pre_processing_ms" if given[0] is None else "retrieval_ms",
            f"leaves nothing to rank in: stages take {sum(taken):g} in the middle of pipeline_ms, "
            f"{budgets.pipeline_ms:g}",
        )
    return taken[0], taken[1]
