"""Mail in Triton. What the host has written before a launch is there for it to read."""

from typing import Final

import torch
import triton
import triton.language as tl

from relaygr.kernels.device import has_tanh
from relaygr.kernels.mail import (
    BEGAN,
    CACHED,
    DENSE,
    ENDED,
    HEAD,
    INPUTS,
    LETTERS,
    POSITION,
    SCORES,
    WORDS,
    Inputs,
    Mail,
)

__all__ = ["collect", "fetch", "receipt", "recipient"]

_LETTERS: Final = tl.constexpr(LETTERS)
_WORDS: Final = tl.constexpr(WORDS)
_INPUTS: Final = tl.constexpr(INPUTS)
_SCORES: Final = tl.constexpr(SCORES)
_BEGAN: Final = tl.constexpr(BEGAN)
_ENDED: Final = tl.constexpr(ENDED)
_HEAD: Final = tl.constexpr(HEAD)
_CACHED: Final = tl.constexpr(CACHED)
_POSITION: Final = tl.constexpr(POSITION)
_DENSE: Final = tl.constexpr(DENSE)

_FETCHED: Final = tl.constexpr(0)
_DELIVERED: Final = tl.constexpr(1)
_TO: Final = tl.constexpr(2)
"""Places in the state."""

_BLOCK: Final = 2048
_MOST: Final = 64
"""Programs that fetch, at most."""


@triton.jit
def _letter(letters, count, PROGRAMS: tl.constexpr, LETTER: tl.constexpr):
    """Where the letter of this launch lies, of so many words each."""
    return letters + tl.load(count) // PROGRAMS % _LETTERS * LETTER


@triton.jit
def recipient(letters, state, PROGRAMS: tl.constexpr, LETTER: tl.constexpr):
    """The letter of this launch, and where it wants its scores."""
    letter = _letter(letters, state + _DELIVERED, PROGRAMS, LETTER)
    return letter, tl.load(state + _TO).to(tl.pointer_type(tl.float32))


@triton.jit
def receipt(letter, state, PROGRAMS: tl.constexpr, TIMED: tl.constexpr):
    """This program has delivered; the last one to do so notes the time."""
    tl.debug_barrier()
    before = tl.atomic_add(state + _DELIVERED, 1, sem="acq_rel")
    if TIMED:  # noqa: SIM102
        if before % PROGRAMS == PROGRAMS - 1:
            tl.store(letter + _ENDED, tl.extra.cuda.globaltimer())


@triton.jit
def _begin(letter, state, TIMED: tl.constexpr):
    """What the first program of a launch does: note the time, and leave word where the scores go."""
    if TIMED:
        tl.store(letter + _BEGAN, tl.extra.cuda.globaltimer())
    tl.store(state + _TO, tl.load(letter + _SCORES))


@triton.jit(do_not_specialize=["words"])
def fetch_words(
    letters, state, target, words,
    PROGRAMS: tl.constexpr, LETTER: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    letter = _letter(letters, state + _FETCHED, PROGRAMS, LETTER)
    if tl.program_id(0) == 0:
        _begin(letter, state, TIMED)
    source = tl.multiple_of(tl.load(letter + _INPUTS).to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(words, 4)
    for begin in range(tl.program_id(0) * BLOCK, words, PROGRAMS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words, cache_modifier=".cg"), mask=at < words)
    tl.debug_barrier()
    tl.atomic_add(state + _FETCHED, 1)


@triton.jit
def _copy(source, target, words, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """This part's blocks of so many words. Of the source, which begins at 16 bytes, up to three more are read."""
    whole = tl.multiple_of((words + 3) // 4 * 4, 4)
    for begin in range(tl.program_id(1) * BLOCK, words, PARTS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < whole, cache_modifier=".cg"), mask=at < words)


@triton.jit(do_not_specialize=["pages"])
def collect_trays(
    letters, state, starts, cached, positions, table, items, dense, pages,
    USERS: tl.constexpr, PARTS: tl.constexpr, LETTER: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    """One program for each user and part of their rows."""
    letter = _letter(letters, state + _FETCHED, USERS * PARTS, LETTER)
    user, part = tl.program_id(0), tl.program_id(1)
    begins = (letter + _WORDS + USERS).to(tl.pointer_type(tl.int32))
    begin, end = tl.load(begins + user), tl.load(begins + user + 1)
    address = tl.load(letter + _WORDS + user)
    there = address != 0
    tray = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    if part == 0:
        if user == 0:
            _begin(letter, state, TIMED)
            tl.store(starts, begin)
        tl.store(starts + user + 1, end)
        tokens = tl.load(tray + _CACHED, mask=there, other=0)
        tl.store(cached + user, tokens)
        tl.store(positions + user, tl.load(tray + _POSITION, mask=there, other=0))
    if there:
        _copy(tray + _HEAD, table + user * pages, pages, PARTS, BLOCK)
        _copy(tray + _HEAD + tl.multiple_of((pages + 3) // 4 * 4, 4), items + begin, end - begin, PARTS, BLOCK)
        if FEATURES:
            behind = tl.multiple_of(tl.load(tray + _DENSE), 4)
            _copy(tray + behind, dense + begin * FEATURES, (end - begin) * FEATURES, PARTS, BLOCK)
    tl.debug_barrier()
    tl.atomic_add(state + _FETCHED, 1)


def fetch(mail: Mail, words: torch.Tensor) -> None:
    """See `mail.fetch`. Four words are read at a time: both ends are aligned to 16 bytes, and so is the length."""
    assert len(words) % 4 == 0
    programs = min(triton.cdiv(len(words), _BLOCK), _MOST)
    fetch_words[programs,](
        mail.letters, mail.state, words, len(words),
        PROGRAMS=programs, LETTER=mail.letters.stride(0), BLOCK=_BLOCK, TIMED=has_tanh(words.device), num_warps=8,
    )  # fmt: skip


def collect(mail: Mail, inputs: Inputs) -> None:
    """See `mail.collect`. Parts of a tray are read four words at a time, as they are aligned to 16 bytes."""
    users, pages = inputs.table.shape
    features = 0 if inputs.dense is None else inputs.dense.shape[1]
    words = len(inputs.items) // users * max(features, 1)
    parts = max(1, min(triton.cdiv(words, _BLOCK), _MOST // users))
    collect_trays[users, parts](
        mail.letters, mail.state, *inputs[:5], inputs.items if inputs.dense is None else inputs.dense.view(torch.int32),
        pages, USERS=users, PARTS=parts, LETTER=mail.letters.stride(0), FEATURES=features, BLOCK=_BLOCK,
        TIMED=has_tanh(inputs.items.device), num_warps=8,
    )  # fmt: skip
