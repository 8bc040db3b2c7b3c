"""Letters are posted in the order of replays, and not written over while their replay may still read them."""

import numpy as np
import torch

from relaygr.engine.mailbox import Mailbox
from relaygr.kernels.mail import BEGAN, ENDED, INPUTS, LETTERS, SCORES, WORDS

CPU = torch.device("cpu")


def test_each_replay_has_the_next_letter_and_finds_its_times_there() -> None:
    box = Mailbox(CPU)
    letters = [box.post(100 + number) for number in range(3)]
    for number, letter in enumerate(letters):
        assert box.mail.letters[number, INPUTS] == 100 + number
        box.mail.letters[number, BEGAN], box.mail.letters[number, ENDED] = 7 + number, 9 + 2 * number
        assert letter.times == (7 + number, 9 + 2 * number)


def test_letters_of_scores_name_trays_and_where_the_rows_of_each_begin() -> None:
    box = Mailbox(CPU, 3)
    box.post_scores((70, 80), (5, 2), 900)
    letter = box.post_scores((10, 20, 30), (1, 2, 3), 901)
    box.mail.letters[1, BEGAN], box.mail.letters[1, ENDED] = 7, 9
    assert letter.times == (7, 9)
    words = box.mail.letters.numpy()
    assert words[:2, SCORES].tolist() == [900, 901]
    assert words[:2, WORDS : WORDS + 3].tolist() == [[70, 80, 0], [10, 20, 30]]
    assert words[:2, WORDS + 3 :].copy().view(np.int32).tolist() == [[0, 5, 7, 7], [0, 1, 3, 6]]
    assert not words[2:].any()


def test_a_box_is_full_until_replays_have_ended() -> None:
    box = Mailbox(CPU)
    letters = [box.post(number) for number in range(LETTERS)]
    full = [box.full]
    letters[0].over()
    full.append(box.full)
    assert box.post(5).number == 0
    assert [*full, box.full] == [True, False, True]


def test_a_full_box_is_guarded_however_often_it_was_full() -> None:
    box, waits = Mailbox(CPU), 0
    for number in range(5 * LETTERS):
        if box.full:
            waits += 1
            box.settle()
        box.post(number)
    assert waits == 4


def test_times_are_those_of_the_replay_even_when_its_letter_was_used_again() -> None:
    box = Mailbox(CPU)
    letters = []
    for number in range(3 * LETTERS):
        if box.full:
            box.settle()
        letters.append(box.post(number))
        box.mail.letters[number % LETTERS, BEGAN], box.mail.letters[number % LETTERS, ENDED] = number, number + 1
    assert [letter.times for letter in letters] == [(n, n + 1) for n in range(3 * LETTERS)]
    for letter in letters[:-1]:
        letter.over()
    assert not box.full
    assert [box.post(0).number for _ in range(LETTERS - 1)] == list(range(LETTERS - 1))
    assert box.full


def test_times_outlive_a_launch_that_failed() -> None:
    box = Mailbox(CPU)
    ran = box.post(1)
    box.mail.letters[0, BEGAN], box.mail.letters[0, ENDED] = 5, 6
    box.forget()
    box.post(2)
    box.mail.letters[0, BEGAN], box.mail.letters[0, ENDED] = 7, 8
    assert ran.times == (5, 6)


def test_after_a_launch_that_failed_both_sides_begin_anew() -> None:
    box = Mailbox(CPU)
    lost = [box.post(number) for number in range(3)]
    box.mail.state.fill_(2)
    box.forget()
    assert not box.mail.state.any()
    assert box.post(8).number == 0
    for letter in lost:
        letter.over()
    assert [box.post(number).number for number in range(LETTERS - 1)] == list(range(1, LETTERS))
    assert box.full
