"""What longer histories bring, and what they cost: quality from runs of `quality.py length`, latency measured here.

    python benchmarks/length_quality.py RUNS.json MODEL.safetensors

Quality is of models trained on MovieLens-1M. Latency is of the model given, through the engine, one rank at a time: in
full, with nothing cached, and by relay, behind a pre-infer; in turns, so that both meet the same machine.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chart import Line, Panel, chart
from common import RESULTS, write_result
from relaygr import Engine, EngineConfig, History
from relaygr.model import RankingModel, checkpoint

CUTS = (16, 32, 64, 128, 256, 512)
CANDIDATES = 128
NAME = "length-quality"


async def latency(model: RankingModel, device: str, repeats: int) -> list[dict[str, float]]:
    """Medians in milliseconds of ranks on every length."""
    rng = np.random.default_rng(0)
    found = []
    config = EngineConfig(device=device, host_cache="0", device_cache="256MiB", max_history=max(CUTS))
    async with Engine(model, config) as engine:
        for cut in CUTS:
            times: dict[str, list[float]] = {"full": [], "relay": []}
            for turn in range(-3, repeats):
                for kind, taken in times.items():
                    user, history = f"{cut}-{turn}-{kind}", _history(rng, model, cut)
                    items = rng.integers(0, model.config.items, CANDIDATES)
                    if kind == "relay":
                        await engine.pre_infer(user, history)
                    began = time.perf_counter()
                    ranked = await engine.rank(user, history, items)
                    ms = (time.perf_counter() - began) * 1e3
                    if str(ranked.path) != {"full": "FULL", "relay": "RESIDENT"}[kind]:
                        raise SystemExit(f"a rank of {kind} took path {ranked.path}")
                    if turn >= 0:
                        taken.append(ms)
                    await engine.evict(user)
            found.append({"cut": cut, **{f"{kind}_ms": round(statistics.median(t), 3) for kind, t in times.items()}})
    return found


def _history(rng: np.random.Generator, model: RankingModel, length: int) -> History:
    items, actions = rng.integers(0, model.config.items, length), rng.integers(0, model.config.actions, length)
    return History(items, actions, 1_000_000 + np.cumsum(rng.integers(1, 600, length)))


def quality(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every cut: ranking AUC and next items, on all and on those who have so many; means over seeds."""
    rows = []
    for index, cut in enumerate(CUTS):
        row: dict[str, Any] = {"cut": cut}
        for by, figures in (("time", ("liked_auc", "loved_auc")), ("leave-one-out", ("hr@10", "ndcg@10"))):
            long = [run for run in runs if run["split"] == by and run["length"] == max(CUTS)]
            for group in ("all", "with_as_many", "with_512"):
                own = [run["cuts"][index][group] for run in long]
                if not own or run_cut(long[0], index) != cut:
                    raise SystemExit(f"the runs say nothing of {cut} behaviours, {by}")
                row |= {f"{name} {group}": round(statistics.mean(one[name] for one in own), 4) for name in figures}
                row[f"{by} {group}"] = own[0].get("targets", own[0]["users"])
        rows.append(row)
    return rows


def run_cut(run: dict[str, Any], index: int) -> int:
    return int(run["cuts"][index]["cut"])


def controls(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Models that were trained for one short length alone."""
    return [
        {"split": run["split"], "trained_for": run["length"], **run["cuts"][0]["all"]}
        for run in runs
        if run["length"] != max(CUTS)
    ]


def picture(result: dict[str, Any]) -> str:
    rows, times = result["figures"]["quality"], result["figures"]["latency"]
    auc = Panel(
        "Ranking AUC (liked: 4 stars and more)",
        [
            Line("all", "a", [(row["cut"], row["liked_auc all"]) for row in rows]),
            Line("those with 512 and more", "b", [(row["cut"], row["liked_auc with_512"]) for row in rows]),
        ],
        digits=3,
    )
    ms = Panel(
        f"Ranking {CANDIDATES} candidates, ms",
        [
            Line("in full", "c", [(row["cut"], row["full_ms"]) for row in times]),
            Line("by relay", "d", [(row["cut"], row["relay_ms"]) for row in times]),
        ],
        from_zero=True,
    )
    about = (
        "Left: the AUC of ranking by the behaviours read. Right: the time a rank takes by the behaviours read, in full "
        "and by relay."
    )
    return chart("What longer histories bring, and what they cost", about, "behaviours read", [auc, ms])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="length-runs.json; the last that has a split counts")
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint whose latency is measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    read = [json.loads(path.read_text()) for path in arguments.runs]
    of = {run["split"]: result for result in read for run in result["figures"]["runs"]}
    runs = [run for by, result in of.items() for run in result["figures"]["runs"] if run["split"] == by]
    model = checkpoint.load(arguments.model)
    times = asyncio.run(latency(model, arguments.device, arguments.repeats))
    inputs = {
        **{key: value for key, value in read[0]["inputs"].items() if key not in ("recipe", "seeds")},
        "trained": {
            by: {"machine": result["machine"]["gpu"], "commit": result["commit"], "recipe": result["inputs"]["recipe"]}
            for by, result in of.items()
        },
        "latency": f"medians of {arguments.repeats} ranks of {CANDIDATES} candidates, one at a time, one core, "
        f"float32; {model.config.family}, {model.config.layers} layers, width {model.config.dim}, "
        f"{model.config.heads} heads",
    }
    figures = {"quality": quality(runs), "controls": controls(runs), "latency": times}
    path = write_result(NAME, inputs, figures)
    picture_path = RESULTS.parent.parent / "docs" / "length.svg"
    picture_path.write_text(picture({"figures": figures}))
    print(f"written to {path} and {picture_path}")


if __name__ == "__main__":
    main()
