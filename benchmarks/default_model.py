"""Make the default model of the package from a folder of `relaygr train ml-latest-small`, and the data it learnt from.

    relaygr data import movielens ml-latest-small data
    relaygr train ml-latest-small data model
    python benchmarks/default_model.py model data

What it writes stands under the terms of MovieLens, and goes with them.
"""

import argparse
import shutil
from pathlib import Path

from relaygr import default
from relaygr.train import dataset as datasets
from relaygr.train.trained import load_trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    arguments = parser.parse_args()
    trained, data = load_trained(arguments.model), datasets.load(arguments.data)
    if (trained.model.config.items, trained.model.config.actions) != (default.ITEMS, default.ACTIONS):
        raise SystemExit("the model is of another data set: change ITEMS and ACTIONS of relaygr.default")
    if not data.licence_text or data.catalogue.titles is None:
        raise SystemExit("the data have come without their terms or titles")
    default.save_histories([data.history(user) for user in range(data.users)], list(data.catalogue.titles))
    for name in ("model.safetensors", "card.md", "LICENCE.txt"):
        shutil.copyfile(arguments.model / name, default.MODEL.with_name(name))
    for path in sorted(default.MODEL.parent.iterdir()):
        print(f"{path.stat().st_size:10,} {path.name}" if path.is_file() else path.name)


if __name__ == "__main__":
    main()
