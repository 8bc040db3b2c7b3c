"""Quality of trained models: many runs at once on one device, each a process.

search   runs of several recipes, judged on the validation part alone: how a recipe was chosen
final    three seeds of one recipe under both tie rules, each scored on the test part once
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, commit, machine
from relaygr.model import checkpoint
from relaygr.train import dataset as datasets
from relaygr.train.recipe import Recipe, read
from relaygr.train.scoring import next_item_metrics, next_item_ranks
from relaygr.train.sequences import Sequences
from relaygr.train.split import split
from relaygr.train.trainer import Epoch, train

PUBLISHED = {
    "SASRec, sampled softmax (generative-recommenders)": {"hr@10": 0.2853, "ndcg@10": 0.1603},
    "HSTU (generative-recommenders)": {"hr@10": 0.3097, "ndcg@10": 0.1720},
    "HSTU-large (generative-recommenders)": {"hr@10": 0.3294, "ndcg@10": 0.1893},
    "SASRec+, full cross-entropy (sasrec-bert4rec-recsys23)": {"hr@10": 0.3152, "ndcg@10": 0.1821},
    "FuXi-α (transformer_benchmark)": {"hr@10": 0.3164, "ndcg@10": 0.1813},
}


def one(data: Path, recipe: Recipe, seed: int, device: str, *, test: bool, save: bool, out: Path) -> None:
    """Train once; write what it came to, and the model where asked."""
    began = time.perf_counter()
    dataset = datasets.load(data, ties=recipe.sequence.ties)

    curve: list[list[Any]] = []

    def show(epoch: Epoch) -> None:
        curve.append([epoch.epoch, epoch.losses, epoch.valid])
        out.with_suffix(".partial").write_text(json.dumps({"recipe": recipe.to_dict(), "curve": curve}))
        figures = {k: round(v, 4) for k, v in {**epoch.losses, **(epoch.valid or {})}.items()}
        print(f"{out.stem} {epoch.epoch} {figures} {epoch.seconds:.1f}s", file=sys.stderr, flush=True)

    done = train(dataset, recipe, seed=seed, device=device, progress=show)
    best = next(epoch for epoch in done.epochs if epoch.epoch == done.best)
    result: dict[str, Any] = {
        "recipe": recipe.to_dict(),
        "seed": seed,
        "best_epoch": done.best,
        "valid": best.valid,
        "curve": curve,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if test:
        sequences = Sequences(dataset, done.model.config, recipe.sequence.length, device)
        targets = split(dataset, recipe.sequence.split).test
        ranks = next_item_ranks(done.model, sequences, dataset, targets, recipe.sequence.length)
        result["test"] = next_item_metrics(ranks)
    if save:
        checkpoint.save(done.model, out.with_suffix(".safetensors"))
    out.write_text(json.dumps(result, indent=1))


def spawn(jobs: list[dict[str, Any]], processes: int) -> list[dict[str, Any]]:
    """Each job in a process of its own, so many at once; results in the order of the jobs."""

    def run(job: dict[str, Any]) -> dict[str, Any]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, __file__, "one", json.dumps(job)], env=environment, check=False)
        out = Path(job["out"])
        if done.returncode or not out.exists():
            return {"failed": done.returncode, **job}
        return dict(json.loads(out.read_text()))

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(run, jobs))


def search(arguments: argparse.Namespace) -> None:
    variants = json.loads(arguments.variants.read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        {
            "data": str(arguments.data / values.pop("data", "ml-1m")),
            "save": values.pop("save", False),
            "recipe": read(values.pop("recipe", arguments.recipe)).with_values(**values).to_dict(),
            "seed": 0,
            "device": arguments.device,
            "test": False,
            "out": str(arguments.out / f"{name}.json"),
        }
        for name, values in variants.items()
    ]
    for name, result in zip(variants, spawn(jobs, arguments.processes), strict=True):
        valid = result.get("valid") or {}
        figures = "  ".join(f"{k} {v:.4f}" for k, v in valid.items())
        print(f"{name:28} epoch {result.get('best_epoch')}  {figures}  {result.get('seconds')} s", flush=True)


def final(arguments: argparse.Namespace) -> None:
    base = read(arguments.recipe)
    work = arguments.out / "runs"
    work.mkdir(parents=True, exist_ok=True)
    jobs = [
        {
            "data": str(arguments.data / "ml-1m"),
            "save": False,
            "recipe": base.with_values(sequence={"ties": ties}).to_dict(),
            "seed": seed,
            "device": arguments.device,
            "test": True,
            "out": str(work / f"{ties}-{seed}.json"),
        }
        for ties in ("file", "reversed")
        for seed in arguments.seeds
    ]
    began = time.perf_counter()
    results = spawn(jobs, arguments.processes)
    wall = time.perf_counter() - began
    failed = [result for result in results if "failed" in result]
    if failed:
        raise SystemExit(f"{len(failed)} runs failed")
    half = len(arguments.seeds)
    by_file, other = (results[:half], results[half:])
    figures: dict[str, Any] = {}
    for suffix, runs in (("", by_file), ("_other_ties", other)):
        for name in ("hr@10", "ndcg@10", "hr@50", "hr@200"):
            values = [run["test"][name] for run in runs]
            figures[f"{name}{suffix}"] = round(statistics.mean(values), 4)
            figures[f"{name}{suffix}_std"] = round(statistics.stdev(values), 4) if len(values) > 1 else None
    inputs = {
        "data": "MovieLens-1M: 6,040 users, 3,706 items, 1,000,209 behaviours",
        "protocol": "leave one out; all items ranked but those among the behaviours read; the newest "
        f"{base.sequence.length} behaviours; checkpoint chosen by NDCG@10 on each user's second-last behaviour; "
        "the test, the last one, scored once; the second-last behaviour is history of the test, never learnt from",
        "ties": "behaviours of one time in the order of the file; _other_ties: in the opposite order, trained anew",
        "seeds": arguments.seeds,
        "recipe": base.to_dict(),
    }
    result = {
        "name": arguments.name,
        **figures,
        "machine": machine(),
        "commit": commit(),
        "inputs": inputs,
        "figures": {
            "runs": [
                {
                    "ties": run["recipe"]["sequence"]["ties"],
                    **{key: run[key] for key in ("seed", "best_epoch", "valid", "test", "seconds")},
                }
                for run in results
            ],
            "wall_s": round(wall, 1),
            "published": PUBLISHED,
        },
    }
    path = arguments.out / f"{arguments.name}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(figures, indent=2), f"\n{wall:.0f} s in all; written to {path}")


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "one":
        job = json.loads(sys.argv[2])
        torch.set_num_threads(1)
        recipe, out = Recipe.from_dict(job["recipe"]), Path(job["out"])
        one(Path(job["data"]), recipe, job["seed"], job["device"], test=job["test"], save=job["save"], out=out)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "final"))
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="a folder of data sets, each under its name",
    )
    parser.add_argument("--recipe", default="ml-1m")
    parser.add_argument("--variants", type=Path, help="search: JSON, {name: {section: {key: value}}}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="quality-ml-1m")
    arguments = parser.parse_args()
    {"search": search, "final": final}[arguments.what](arguments)


if __name__ == "__main__":
    main()
