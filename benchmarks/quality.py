"""Quality of trained models: many runs at once on one device, each a process.

search    runs of several recipes, judged on the validation part alone: how a recipe was chosen
next      three seeds of MovieLens-1M under both tie rules, each scored on the test part once
length    three seeds of models that read up to 512 behaviours, scored on histories cut to their newest 16 … 512
kuairand  three seeds of the ranking of KuaiRand-Pure, split by time
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import RESULTS, commit, machine
from relaygr.model import RankingModel, checkpoint
from relaygr.train import dataset as datasets
from relaygr.train.recipe import Recipe, read
from relaygr.train.scoring import next_item_metrics, next_item_ranks, ranking_metrics, ranking_scores
from relaygr.train.sequences import Sequences
from relaygr.train.split import split
from relaygr.train.trainer import Epoch, train

CUTS = (16, 32, 64, 128, 256, 512)
CONTROL = 16
"""The length for which a model of its own is trained, too."""

PUBLISHED = {
    "SASRec, sampled softmax (generative-recommenders)": {"hr@10": 0.2853, "ndcg@10": 0.1603},
    "HSTU (generative-recommenders)": {"hr@10": 0.3097, "ndcg@10": 0.1720},
    "HSTU-large (generative-recommenders)": {"hr@10": 0.3294, "ndcg@10": 0.1893},
    "SASRec+, full cross-entropy (sasrec-bert4rec-recsys23)": {"hr@10": 0.3152, "ndcg@10": 0.1821},
    "FuXi-α (transformer_benchmark)": {"hr@10": 0.3164, "ndcg@10": 0.1813},
}


Job = dict[str, Any]


def one(job: Job) -> None:
    """Train once; write what it came to, and the model where asked."""
    began = time.perf_counter()
    recipe, out, device = Recipe.from_dict(job["recipe"]), Path(job["out"]), job["device"]
    dataset = datasets.load(job["data"], ties=recipe.sequence.ties)
    curve: list[list[Any]] = []

    def show(epoch: Epoch) -> None:
        curve.append([epoch.epoch, epoch.losses, epoch.valid])
        out.with_suffix(".partial").write_text(json.dumps({"recipe": recipe.to_dict(), "curve": curve}))
        figures = {k: round(v, 4) for k, v in {**epoch.losses, **(epoch.valid or {})}.items()}
        print(f"{out.stem} {epoch.epoch} {figures} {epoch.seconds:.1f}s", file=sys.stderr, flush=True)

    done = train(dataset, recipe, seed=job["seed"], device=device, progress=show)
    best = next(epoch for epoch in done.epochs if epoch.epoch == done.best)
    result: Job = {
        "machine": machine(),
        "commit": job["commit"],
        "recipe": recipe.to_dict(),
        "seed": job["seed"],
        "best_epoch": done.best,
        "valid": best.valid,
        "curve": curve,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if job["cuts"]:
        result["cuts"] = cut_to(job["cuts"], done.model, recipe, dataset, device, out.with_suffix(".npz"))
    elif job["test"]:
        result["test"] = judged(done.model, recipe, dataset, device)
    if job["save"]:
        checkpoint.save(done.model, out.with_suffix(".safetensors"))
    out.write_text(json.dumps(result, indent=1))


def judged(model: RankingModel, recipe: Recipe, dataset: datasets.Dataset, device: str) -> dict[str, Any]:
    """Figures on the test part: next items where one was left out, ranking where time split."""
    length = recipe.sequence.length
    sequences = Sequences(dataset, model.config, length, device)
    targets = split(dataset, recipe.sequence.split).test
    if recipe.sequence.split == "time":
        scores = ranking_scores(model, sequences, dataset, targets, length)
        return dict(ranking_metrics(dataset, targets, scores))
    return dict(next_item_metrics(next_item_ranks(model, sequences, dataset, targets, length)))


def cut_to(
    cuts: Sequence[int], model: RankingModel, recipe: Recipe, dataset: datasets.Dataset, device: str, out: Path
) -> list[dict[str, Any]]:
    """Figures of the test part on histories cut to their newest: of ranking, where it was learnt, else of next items.

    What every target came to, its scores or its rank, goes to `out`.
    """
    sequences = Sequences(dataset, model.config, max(cuts), device)
    targets = split(dataset, recipe.sequence.split).test
    came_to: list[np.ndarray[Any, Any]] = []
    found = []
    for cut in cuts:
        if recipe.objective.ranking:
            came_to.append(ranking_scores(model, sequences, dataset, targets, cut))
            figures = ranking_metrics(dataset, targets, came_to[-1])
            row = {f"{label}_auc": values["auc"] for label, values in figures.items()}
        else:
            came_to.append(next_item_ranks(model, sequences, dataset, targets, cut, leave_out_all=True))
            row = next_item_metrics(came_to[-1])
        found.append({"cut": cut, **row})
        print(f"{out.stem} {found[-1]}", file=sys.stderr, flush=True)
    labels = dataset.labels[dataset.offsets[targets.users] + targets.places]
    np.savez_compressed(out, cuts=cuts, users=targets.users, places=targets.places, labels=labels, came_to=came_to)
    return found


def spawn(jobs: list[Job], processes: int) -> list[Job]:
    """Each job in a process of its own, so many at once; results in the order of the jobs. One done before is kept."""

    def run(job: Job) -> Job:
        if Path(job["out"]).exists():
            return dict(json.loads(Path(job["out"]).read_text()))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, __file__, "one", json.dumps(job)], env=environment, check=False)
        out = Path(job["out"])
        if done.returncode or not out.exists():
            return {"failed": done.returncode, **job}
        return dict(json.loads(out.read_text()))

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(run, jobs))


def job_of(arguments: argparse.Namespace, name: str, data: str, recipe: Recipe, seed: int = 0, **more: Any) -> Job:
    (arguments.out / "runs").mkdir(parents=True, exist_ok=True)
    return {
        "data": str(arguments.data / data),
        "recipe": recipe.to_dict(),
        "seed": seed,
        "device": arguments.device,
        "out": str(arguments.out / "runs" / f"{name}.json"),
        "commit": arguments.commit or commit(),
        "save": False,
        "test": True,
        "cuts": (),
        **more,
    }


def search(arguments: argparse.Namespace) -> None:
    variants = json.loads(arguments.variants.read_text())
    jobs = []
    for name, values in variants.items():
        data = values.pop("data", "ml-1m")
        recipe = read(values.pop("recipe", "ml-1m")).with_values(**values)
        jobs.append(job_of(arguments, name, data, recipe, test=False))
    looked_at = {}
    for name, result in zip(variants, spawn(jobs, arguments.processes), strict=True):
        looked_at[name] = {key: result.get(key) for key in ("recipe", "best_epoch", "valid", "seconds")}
        figures = "  ".join(f"{k} {v:.4f}" for k, v in (result.get("valid") or {}).items())
        print(f"{name:28} epoch {result.get('best_epoch')}  {figures}  {result.get('seconds')} s", flush=True)
    (arguments.out / "search.json").write_text(json.dumps(looked_at, indent=1) + "\n")


def next_jobs(arguments: argparse.Namespace) -> list[Job]:
    base = read("ml-1m")
    return [
        job_of(arguments, f"next-{ties}-{seed}", "ml-1m", base.with_values(sequence={"ties": ties}), seed)
        for ties in ("file", "reversed")
        for seed in arguments.seeds
    ]


def next_result(arguments: argparse.Namespace, results: list[Job]) -> dict[str, Any]:
    half = len(arguments.seeds)
    figures: dict[str, Any] = {}
    for suffix, runs in (("", results[:half]), ("_other_ties", results[half:])):
        for name in ("hr@10", "ndcg@10", "hr@50", "hr@200"):
            figures |= mean_of(f"{name}{suffix}", [run["test"][name] for run in runs])
    base = read("ml-1m")
    inputs = {
        "data": "MovieLens-1M: 6,040 users, 3,706 items, 1,000,209 behaviours",
        "protocol": "leave one out; all items ranked but those among the behaviours read; the newest "
        f"{base.sequence.length} behaviours; checkpoint chosen by NDCG@10 on each user's second-last behaviour; "
        "the test, the last one, scored once; the second-last behaviour is history of the test, never learnt from",
        "ties": "behaviours of one time in the order of the file; _other_ties: in the opposite order, trained anew",
    }
    return written(arguments, "quality-ml-1m", figures, inputs, results, published=PUBLISHED)


def length_jobs(arguments: argparse.Namespace) -> list[Job]:
    recipe = read("ml-1m-long")
    same = {"length": max(CUTS), "split": "time", "crop": recipe.sequence.crop}
    items = read("ml-1m").with_values(sequence=same, optimiser={"epochs": 16, "tokens": recipe.optimiser.tokens})
    jobs = []
    for seed in arguments.seeds:
        jobs.append(job_of(arguments, f"length-ranking-{seed}", "ml-1m", recipe, seed, cuts=CUTS, save=seed == 0))
        jobs.append(job_of(arguments, f"length-next-{seed}", "ml-1m", items, seed, cuts=CUTS))
    short = {"length": CONTROL, "crop": 0.0}
    for name, own in (("ranking", recipe), ("next", items)):
        own = own.with_values(sequence=short)
        jobs.append(job_of(arguments, f"length-{name}-only-{CONTROL}", "ml-1m", own, cuts=(CONTROL,)))
    return jobs


def length_result(arguments: argparse.Namespace, results: list[Job]) -> None:
    """`length_quality.py` makes the figures of these runs."""
    print(f"{len(results)} runs are in {arguments.out / 'runs'}")


def kuairand_jobs(arguments: argparse.Namespace) -> list[Job]:
    base = read("kuairand-pure")
    return [job_of(arguments, f"kuairand-{seed}", "kuairand-pure", base, seed) for seed in arguments.seeds]


def kuairand_result(arguments: argparse.Namespace, results: list[Job]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for label in ("is_click", "long_view", "is_like"):
        for name in ("auc", "normalized_entropy", "calibration"):
            figures |= mean_of(f"{label}_{name}", [run["test"][label][name] for run in results])
    inputs = {
        "data": "part of KuaiRand-Pure (Gao et al., CIKM 2022; CC BY-SA 4.0): the validation and test rows of a public "
        "split, 27,077 users; what users watched before is known as a sequence cut to the newest 50 and without times",
        "protocol": "split by time: the first 80% of the labelled behaviours are learnt from, the next 10% chose the "
        "checkpoint, the last 10% are the test, scored once; a target is ranked on all of its user's behaviours before "
        "it, test rows included, up to the newest 64",
    }
    return written(arguments, "quality-kuairand-pure", figures, inputs, results)


def mean_of(name: str, values: list[float]) -> dict[str, Any]:
    """Mean over seeds, and spread."""
    spread = round(statistics.stdev(values), 4) if len(values) > 1 else None
    return {name: round(statistics.mean(values), 4), f"{name}_std": spread}


def written(
    arguments: argparse.Namespace,
    name: str,
    top: dict[str, Any],
    inputs: dict[str, Any],
    results: list[Job],
    **more: Any,
) -> dict[str, Any]:
    kept = ("best_epoch", "valid", "test", "cuts", "seconds")
    runs = [
        {
            **{key: run["recipe"]["sequence"][key] for key in ("split", "ties", "length")},
            "seed": run["seed"],
            **{key: run[key] for key in kept if run.get(key)},
        }
        for run in results
    ]
    recipe = {key: value for key, value in results[0]["recipe"].items() if key != "about"}
    result = {
        "name": name,
        **top,
        "machine": machine(),
        "commit": arguments.commit or commit(),
        "inputs": {**inputs, "seeds": arguments.seeds, "recipe": recipe},
        "figures": {"runs": runs, "wall_s": arguments.wall_s, "processes": arguments.processes, **more},
    }
    path = arguments.out / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(top, indent=2), f"\nwritten to {path}", flush=True)
    return result


PARTS = {
    "next": (next_jobs, next_result),
    "length": (length_jobs, length_result),
    "kuairand": (kuairand_jobs, kuairand_result),
}


def final(arguments: argparse.Namespace) -> None:
    """The parts asked for, their runs side by side."""
    jobs = {part: PARTS[part][0](arguments) for part in arguments.what}
    began = time.perf_counter()
    results = spawn([job for part in jobs.values() for job in part], arguments.processes)
    arguments.wall_s = round(time.perf_counter() - began, 1)
    failed = []
    for part, wanted in jobs.items():
        own, results = results[: len(wanted)], results[len(wanted) :]
        failed += [run["out"] for run in own if "failed" in run]
        if not any("failed" in run for run in own):
            PARTS[part][1](arguments, own)
    print(f"{arguments.wall_s} s in all")
    if failed:
        raise SystemExit(f"these runs failed: {', '.join(failed)}")


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "one":
        torch.set_num_threads(1)
        one(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("search", *PARTS), help="search, or parts that run side by side")
    parser.add_argument("--data", type=Path, required=True, help="a folder of data sets, each under its name")
    parser.add_argument("--variants", type=Path, help="search: JSON, {name: {section: {key: value}}}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit measured, where there is no repository to ask")
    arguments = parser.parse_args()
    if "search" in arguments.what:
        search(arguments)
    else:
        final(arguments)


if __name__ == "__main__":
    main()
