"""Rows stay with their users, whoever goes before them."""

import random

import numpy as np

from relaygr.cache.held import Held


def test_columns_are_those_of_their_users_after_any_comings_and_goings() -> None:
    held, model, lot = Held(), dict[str, list[float]](), random.Random(0)
    for turn in range(2000):
        user = f"u{lot.randrange(150)}"
        action = lot.choice(("add", "remove", "seen", "head", "twice"))
        if action == "add" and user not in model:
            held.add(user, last=0.5, tokens=turn, head=3, twice=bool(turn % 2), page=turn)
            model[user] = [0.5, turn, 3, turn % 2, turn]
        elif action == "remove" and user in model:
            held.remove(user)
            del model[user]
        elif action == "seen":
            held.seen(user, float(turn))
            if user in model:
                model[user][0] = turn
        elif action == "head" and user in model:
            held.set_head(user, turn)
            model[user][2] = turn
        elif action == "twice":
            held.set_twice(user, bool(turn % 3))
            if user in model:
                model[user][3] = bool(turn % 3)
        rows = np.array([model[each] for each in held.users]).reshape(-1, 5)
        assert sorted(held.users) == sorted(model)
        for column, right in zip(held.columns, rows.T, strict=True):
            np.testing.assert_array_equal(column, right)
