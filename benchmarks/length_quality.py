"""What longer histories bring, and what they cost: quality from runs of `quality.py length`, latency measured here.

    python benchmarks/length_quality.py RUNS

RUNS holds length-*.json, .npz and length-ranking-0.safetensors. Latency is of that model, through the engine, one rank
at a time: in full, with nothing cached, and by relay, behind a pre-infer; in turns, so that both meet the same machine.
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
from intervals import Draws, interval
from relaygr import Engine, EngineConfig, History
from relaygr.model import RankingModel, checkpoint

CUTS = (16, 32, 64, 128, 256, 512)
CANDIDATES = 128
DRAWS = 1000
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


class Runs:
    """The runs of one kind, ranking or next items, one for each seed: what every target came to, on every cut."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        paths = sorted(folder.glob(f"length-{kind}-[0-9]*.json"))
        if not paths:
            raise SystemExit(f"{folder} has no runs of {kind}")
        self.about = [json.loads(path.read_text()) for path in paths]
        arrays = [np.load(path.with_suffix(".npz")) for path in paths]
        if any(tuple(own["cuts"]) != CUTS for own in arrays):
            raise SystemExit(f"runs of {kind} were cut to other lengths than {CUTS}")
        self.came_to = [own["came_to"] for own in arrays]
        self.users, self.places, self.labels = (arrays[0][name] for name in ("users", "places", "labels"))
        only = json.loads(next(folder.glob(f"length-{kind}-only-*.json")).read_text())
        self.control = {"trained_for": only["recipe"]["sequence"]["length"], "figures": only["cuts"][0]}

    def figures(self, cut: int, rows: Any, draws: Draws) -> dict[str, list[Any]]:
        """For each figure its draws, by seed, on these targets, with histories cut to so many."""
        found: dict[str, list[Any]] = {}
        for own in self.came_to:
            at = own[CUTS.index(cut)][rows]
            if self.kind == "ranking":
                for task, label in enumerate(("liked", "loved")):
                    own_labels, logits = self.labels[rows, task], at[:, task]
                    found.setdefault(f"{label}_auc", []).append(draws.aucs(own_labels, logits))
                    found.setdefault(f"{label}_auc_within", []).append(draws.aucs_within(own_labels, logits))
            else:
                found.setdefault("hr@10", []).append(draws.means(at <= 10))
                found.setdefault("ndcg@10", []).append(draws.means(np.where(at <= 10, 1 / np.log2(1.0 + at), 0.0)))
        return found


def quality(kinds: list[Runs]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """For every cut figures on all, on those with as many and on those with 512, means over seeds; and what 512 bring
    over each of the others, with an interval over users."""
    rows: list[dict[str, Any]] = [{"cut": cut} for cut in CUTS]
    gains: list[dict[str, Any]] = [{"over": cut} for cut in CUTS[:-1]]
    for runs in kinds:
        for group in ("all", "with_as_many", "with_512"):
            by_cut = []
            for row in rows:
                least = {"all": 0, "with_as_many": row["cut"], "with_512": max(CUTS)}[group]
                chosen = runs.places >= least
                row[f"targets {group}"], users = int(chosen.sum()), runs.users[chosen]
                row[f"users {group}"] = len(np.unique(users))
                draws = Draws(users, 0 if group == "with_as_many" else DRAWS)
                by_cut.append(runs.figures(row["cut"], chosen, draws))
                for name, seeds in by_cut[-1].items():
                    values = [float(own[0]) for own in seeds]
                    row[f"{name} {group}"] = round(statistics.mean(values), 4)
                    row[f"{name} {group} std"] = round(statistics.stdev(values), 4) if len(values) > 1 else None
                print(f"{runs.kind} {group} {row['cut']}", flush=True)
            if group != "with_as_many":
                for gain, fewer in zip(gains, by_cut[:-1], strict=True):
                    for name, seeds in by_cut[-1].items():
                        gain[f"{name} {group}"] = interval(np.mean(seeds, axis=0) - np.mean(fewer[name], axis=0))
    return rows, gains


def picture(result: dict[str, Any]) -> str:
    rows, times = result["figures"]["quality"], result["figures"]["latency"]
    auc = Panel(
        "Ranking AUC (liked: 4 stars and more)",
        [
            Line("over all targets", "a", [(row["cut"], row["liked_auc all"]) for row in rows]),
            Line("within users", "b", [(row["cut"], row["liked_auc_within all"]) for row in rows]),
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
    parser.add_argument("runs", type=Path, help="the folder of runs of `quality.py length`")
    parser.add_argument("--device", default="cpu", help="where latency is measured")
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = checkpoint.load(arguments.runs / "length-ranking-0.safetensors")
    times = asyncio.run(latency(model, arguments.device, arguments.repeats))
    kinds = [Runs(arguments.runs, kind) for kind in ("ranking", "next")]
    rows, gains = quality(kinds)
    first = kinds[0].about[0]
    inputs = {
        "data": "MovieLens-1M: 6,040 users, 3,706 items, 1,000,209 behaviours",
        "protocol": "split by time: the first 80% of all behaviours are learnt from, the next 10% chose recipe "
        "(length-search.json) and checkpoint, the last 10% are the test; a target is predicted from its user's "
        "behaviours before it, test rows included, cut to the newest",
        "ranking": "AUC of liked (4 stars and more) and loved (more than 4), over all targets, and within users: the "
        "mean of users' own AUCs by their targets",
        "next item": "HR@10 and NDCG@10 of the same targets, by models that learn next items alone: all items ranked "
        "but those of all of the user's behaviours before, whatever is read",
        "gains": f"512 behaviours against fewer, mean over seeds; low and high: the middle 95% of {DRAWS} draws of "
        "users with replacement",
        "seeds": [run["seed"] for run in kinds[0].about],
        "trained": {"machine": first["machine"], "commit": first["commit"]},
        "recipes": {runs.kind: runs.about[0]["recipe"] for runs in kinds},
        "latency": f"medians of {arguments.repeats} ranks of {CANDIDATES} candidates, one at a time, one core, "
        f"float32; {model.config.family}, {model.config.layers} layers, width {model.config.dim}, "
        f"{model.config.heads} heads",
    }
    figures = {
        "quality": rows,
        "gains": gains,
        "controls": {runs.kind: runs.control for runs in kinds},
        "valid": {runs.kind: [own["valid"] for own in runs.about] for runs in kinds},
        "seconds": {runs.kind: [own["seconds"] for own in runs.about] for runs in kinds},
        "latency": times,
    }
    path = write_result(NAME, inputs, figures)
    picture_path = RESULTS.parent.parent / "docs" / "length.svg"
    picture_path.write_text(picture({"figures": figures}))
    print(f"written to {path} and {picture_path}")


if __name__ == "__main__":
    main()
