"""Training: it learns, it is the same for the same seed, and it goes on where it stopped."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Behaviours, Dataset, Facts
from relaygr.train.recipe import Recipe
from relaygr.train.scoring import next_item_metrics, next_item_ranks, ranking_metrics, ranking_scores
from relaygr.train.sequences import Sequences
from relaygr.train.split import split
from relaygr.train.trainer import Epoch, Trained, _Windows, fresh_model, train
from small_data import cyclic, rows_of

SMALL = Recipe.from_dict(
    {
        "name": "small",
        "model": {"family": "hstu", "layers": 1, "dim": 16, "heads": 2, "scale_length": 16.0},
        "sequence": {"length": 12},
        "objective": {"next_item": 1.0, "ranking": 1.0, "temperature": 0.1},
        "optimiser": {"epochs": 4, "batch": 8, "rate": 0.02, "warm_up": 5, "dropout": 0.1},
    }
)


class Stop(Exception):
    pass


def assert_same(one: Trained, other: Trained) -> None:
    assert one.best == other.best
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


@pytest.mark.parametrize("family", ["hstu", "softmax"])
def test_both_families_learn_next_items_and_labels(family: str) -> None:
    data = cyclic()
    recipe = SMALL.with_values(
        model={"family": family}, optimiser={"epochs": 30, "evaluate_every": 10}, objective={"negatives": 10}
    )
    done = train(data, recipe, seed=1)
    targets = split(data, "leave-one-out").test
    sequences = Sequences(data, done.model.config, 12)
    assert next_item_metrics(next_item_ranks(done.model, sequences, data, targets, 12))["hr@10"] > 0.9
    figures = ranking_metrics(data, targets, ranking_scores(done.model, sequences, data, targets, 12))
    assert figures["liked"]["auc"] > 0.95
    assert figures["loved"]["auc"] > 0.95


def test_the_same_seed_trains_the_same_model_and_another_another() -> None:
    one, same, other = (train(cyclic(), SMALL, seed=seed) for seed in (1, 1, 2))
    assert_same(one, same)
    assert not torch.equal(one.model.head_weight, other.model.head_weight)


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_training_that_was_stopped_ends_as_if_it_had_not_been(average: float, tmp_path: Path) -> None:
    recipe = SMALL.with_values(optimiser={"average": average})
    whole = train(cyclic(), recipe, seed=1)

    def stop(epoch: Epoch) -> None:
        if epoch.epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        train(cyclic(), recipe, seed=1, folder=tmp_path, progress=stop)
    later: list[int] = []
    kept: list[int] = []

    def again(epoch: Epoch) -> None:
        later.append(epoch.epoch)

    resumed = train(cyclic(), recipe, seed=1, folder=tmp_path, resumed=kept.append, progress=again)
    assert (kept, later) == ([3], [3])  # epoch 2 was kept before it was told
    assert [epoch.epoch for epoch in resumed.epochs] == [0, 1, 2, 3]
    assert_same(whole, resumed)


@pytest.mark.parametrize("other", ["seed", "recipe"])
def test_the_state_of_another_run_is_refused(other: str, tmp_path: Path) -> None:
    train(cyclic(), SMALL.with_values(optimiser={"epochs": 1}), seed=1, folder=tmp_path)
    with pytest.raises(InvalidInput, match="another recipe or seed"):
        train(
            cyclic(),
            SMALL.with_values(optimiser={"epochs": 1 if other == "seed" else 2}),
            seed=2 if other == "seed" else 1,
            folder=tmp_path,
        )


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidInput, match="folder"):
        train(cyclic(), SMALL, folder=tmp_path)


def test_training_ends_when_looks_bring_nothing_better() -> None:
    recipe = SMALL.with_values(optimiser={"epochs": 50, "rate": 1e-12, "patience": 2})
    assert len(train(cyclic(), recipe).epochs) == 4


def test_a_label_that_is_never_positive_is_learnt_and_has_no_auc() -> None:
    rows, data = rows_of(), cyclic()
    rows.labels[:, 1] = 0
    recipe = SMALL.with_values(sequence={"split": "time"}, objective={"next_item": 0.0}, optimiser={"epochs": 2})
    done = train(Dataset(data.facts, data.catalogue, rows), recipe)
    valid = done.epochs[done.best].valid
    assert valid is not None
    assert math.isnan(valid["loved_auc"])
    assert valid["choice"] == valid["liked_auc"]


def test_cropped_windows_lie_anywhere_in_what_is_learnt_from() -> None:
    data = cyclic()
    parts = split(data, "leave-one-out")
    torch.manual_seed(0)
    found = list(_Windows(data, parts, 13, 0.5, torch.device("cpu")).epoch(1000))
    starts, lengths, longest = (torch.cat([step[0] for step in found]), torch.cat([step[1] for step in found]), 13)
    owners = np.searchsorted(data.offsets, starts.numpy(), side="right") - 1
    stops = data.offsets[owners] + parts.train_stop[owners]
    assert (starts.numpy() + lengths.numpy() <= stops).all()
    assert lengths.min() >= 2
    assert lengths.max() == longest
    assert 0.3 < (lengths < longest).float().mean() < 0.7
    assert (starts.numpy() + lengths.numpy() < stops).any()


def test_steps_of_so_many_behaviours_have_windows_of_like_lengths_and_leave_none_out() -> None:
    data = cyclic()
    windows = _Windows(data, split(data, "leave-one-out"), 13, 0.8, torch.device("cpu"))
    torch.manual_seed(0)
    steps = windows.epoch(1, tokens=60)
    assert sum(len(starts) for starts, _, _ in steps) == len(windows)
    for starts, lengths, longest in steps:
        assert len(starts) * longest <= 60
        assert longest == lengths.max()
    held, read = sum(len(starts) * longest for starts, _, longest in steps), sum(int(n.sum()) for _, n, _ in steps)
    assert held < 1.3 * read, "little is padded"
    again = windows.epoch(1, tokens=60)
    assert [step[2] for step in steps] != [step[2] for step in again]


def test_a_model_learns_from_steps_of_so_many_behaviours() -> None:
    recipe = SMALL.with_values(
        sequence={"crop": 0.5}, optimiser={"epochs": 30, "evaluate_every": 10, "tokens": 96, "warm_up": 20}
    )
    done = train(cyclic(), recipe, seed=1)
    valid = done.epochs[-1].valid
    assert valid is not None
    assert valid["liked_auc"] > 0.9


@pytest.mark.parametrize(("positions", "stays"), [("noise", False), ("waves", False), ("fixed", True)])
def test_positions_that_are_fixed_are_not_learnt(positions: str, stays: bool) -> None:
    recipe = SMALL.with_values(optimiser={"positions": positions, "epochs": 1, "average": 0.9})
    before = fresh_model(recipe, cyclic(), 1).embedding.positions
    after = train(cyclic(), recipe, seed=1).model.embedding.positions
    assert torch.equal(before, after) is stays


def test_a_rate_that_is_too_high_is_said_so() -> None:
    with pytest.raises(InvalidInput, match="rate"):
        train(cyclic(), SMALL.with_values(optimiser={"rate": 1e30, "warm_up": 0}))


def test_data_of_single_behaviours_are_refused() -> None:
    data = cyclic(5)
    rows = rows_of(5)
    few = Behaviours(
        np.arange(5),
        rows.names,
        rows.items[:5],
        rows.actions[:5],
        rows.timestamps[:5],
        rows.labels[:5],
    )
    with pytest.raises(InvalidInput, match="two behaviours"):
        train(Dataset(data.facts, data.catalogue, few), SMALL)


@pytest.mark.parametrize("known", ["no column", "no value"])
def test_ranking_is_not_learnt_from_data_without_labels_and_next_items_are(known: str) -> None:
    data, rows = cyclic(), rows_of()
    if known == "no column":
        bare = Dataset(Facts("bare", (), 2), data.catalogue, replace(rows, labels=rows.labels[:, :0]))
    else:
        bare = Dataset(data.facts, data.catalogue, replace(rows, labels=np.full_like(rows.labels, UNKNOWN)))
    with pytest.raises(InvalidInput, match=r"^objective.ranking: the data has no labels; .*label:NAME=COLUMN"):
        train(bare, SMALL)
    assert train(bare, SMALL.with_values(objective={"ranking": 0.0}, optimiser={"epochs": 1})).best == 0
