"""`relaygr train` and `relaygr evaluate`, as a user calls them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relaygr.cascade.catalogue import Catalogue
from relaygr.cli import app
from relaygr.files import alone
from relaygr.model import checkpoint
from relaygr.train import dataset as datasets
from relaygr.train.trained import LOCK
from small_data import cyclic, rows_of

RECIPE = """
name = "tiny"
about = "A walk round the items"
[model]
family = "{family}"
layers = 1
dim = 16
heads = 2
[sequence]
length = 12
split = "{split}"
[objective]
next_item = 1.0
ranking = 1.0
negatives = 10
[optimiser]
epochs = 3
batch = 8
rate = 0.02
"""


def call(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


@pytest.fixture(scope="module", params=["hstu time", "softmax leave-one-out"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    family, by = request.param.split()
    (folder / "tiny.toml").write_text(RECIPE.format(family=family, split=by))
    data = cyclic()
    datasets.save(folder / "data", data.facts, data.catalogue, rows_of(), "Terms.")
    call("train", folder / "tiny.toml", folder / "data", folder / "model", "--seed", "1")
    return folder


def test_a_trained_folder_has_all_that_serving_needs(trained: Path) -> None:
    model = checkpoint.load(trained / "model" / "model.safetensors")
    items = Catalogue.load(trained / "model" / "items.safetensors")
    assert len(items) == model.config.items
    assert items.title(3) == "Film 3"
    assert (trained / "model" / "LICENCE.txt").read_text() == "Terms."
    assert not (trained / "model" / "state.safetensors").exists()


def test_the_card_tells_what_evaluate_finds(trained: Path) -> None:
    told = json.loads(call("evaluate", trained / "model", trained / "data", "--json"))
    card = (trained / "model" / "card.md").read_text()
    assert "A walk round the items" in card
    assert f"{told['next_item']['hr@10']:.4f}" in card
    assert f"{told['ranking']['liked']['auc']:.4f}" in card
    about = json.loads((trained / "model" / "training.json").read_text())
    assert about["figures"]["ranking"] == told["ranking"]


def test_ranking_offline_and_by_relay_agree_to_the_last_digit(trained: Path) -> None:
    arguments = ("evaluate", trained / "model", trained / "data", "--through", "engine")
    engine: dict[str, Any] = json.loads(call(*arguments, "--json"))["engine"]
    assert engine["agree"]
    assert engine["offline"] == engine["relayed"]
    assert 0 < engine["offline"]["liked"]["auc"] <= 1
    assert sum(engine["paths"].values()) == engine["targets"]
    assert "FULL" not in engine["paths"]
    assert "The figures agree" in call(*arguments)


def test_a_shorter_history_gives_other_figures(trained: Path) -> None:
    whole, short = (
        json.loads(call("evaluate", trained / "model", trained / "data", "--length", length, "--json"))
        for length in ("12", "1")
    )
    assert short["length"] == 1
    assert whole["next_item"] != short["next_item"]


def test_a_model_is_not_trained_over(trained: Path) -> None:
    said = call("train", trained / "tiny.toml", trained / "data", trained / "model", status=1)
    assert "holds a trained model already" in said


def test_every_epoch_is_told_with_the_time_that_is_left(trained: Path, tmp_path: Path) -> None:
    arguments = ("train", trained / "tiny.toml", trained / "data", tmp_path / "out")
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    lines = result.stderr.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"epoch {number} of 3" for number in (1, 2, 3)]
    assert lines[-1].startswith("epoch 3 of 3, 0:00:00 left: next_item ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["LICENCE.txt", "card.md", "items.safetensors", "model.safetensors", "training.json"]
    )


def test_interrupted_it_says_how_to_go_on_and_does(trained: Path, tmp_path: Path) -> None:
    recipe, data, out = tmp_path / "longer.toml", trained / "data", tmp_path / "out"
    recipe.write_text((trained / "tiny.toml").read_text().replace("epochs = 3", "epochs = 40"))
    command = [sys.executable, "-m", "relaygr", "train", *map(str, (recipe, data, out))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("epoch 1 of 40, ")
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 130
    stopped = int(told[-1].removeprefix("stopped after epoch ").removesuffix("; the same command goes on"))
    assert "is not finished: run the same `relaygr train` again" in call("evaluate", out, data, status=1)
    result = CliRunner().invoke(app, ["train", str(recipe), str(data), str(out)])
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == f"going on at epoch {stopped + 1} of 40"
    assert result.stderr.splitlines()[1].startswith(f"epoch {stopped + 1} of 40, ")
    assert (out / "card.md").exists()


def test_a_folder_that_another_trains_into_is_refused(trained: Path, tmp_path: Path) -> None:
    with alone(tmp_path / LOCK, "out", "taken"):
        said = call("train", trained / "tiny.toml", trained / "data", tmp_path, status=1)
    assert "another `relaygr train` trains into" in said


def test_data_that_a_model_was_not_made_for_are_refused(trained: Path, tmp_path: Path) -> None:
    data = cyclic()
    fewer = datasets.Items((*data.catalogue.sources, "x"))
    datasets.save(tmp_path / "data", data.facts, fewer, rows_of())
    assert "31 items" in call("evaluate", trained / "model", tmp_path / "data", status=1)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_said_so(device: str, trained: Path, tmp_path: Path) -> None:
    data = trained / "data"
    assert "device" in call("train", trained / "tiny.toml", data, tmp_path / "out", "--device", device, status=1)
    assert "device" in call("evaluate", trained / "model", data, "--device", device, status=1)


def test_folders_and_recipes_that_are_none_are_said_so(trained: Path, tmp_path: Path) -> None:
    assert "relaygr train" in call("evaluate", tmp_path, trained / "data", status=1)
    assert "relaygr data import" in call("train", "ml-1m", tmp_path, tmp_path / "out", status=1)
    assert "ml-latest-small" in call("train", "nothing", trained / "data", tmp_path / "out", status=1)
