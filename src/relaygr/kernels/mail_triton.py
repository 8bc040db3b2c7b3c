"""Mail in Triton. What the host has written before a launch is there for it to read."""

from typing import Final

import torch
import triton
import triton.language as tl

from relaygr.kernels.device import has_tanh
from relaygr.kernels.mail import BEGAN, ENDED, INPUTS, LETTERS, SCORES, WORDS, Mail

__all__ = ["fetch", "receipt", "recipient"]

_LETTERS: Final = tl.constexpr(LETTERS)
_WORDS: Final = tl.constexpr(WORDS)
_INPUTS: Final = tl.constexpr(INPUTS)
_SCORES: Final = tl.constexpr(SCORES)
_BEGAN: Final = tl.constexpr(BEGAN)
_ENDED: Final = tl.constexpr(ENDED)

_FETCHED: Final = tl.constexpr(0)
_DELIVERED: Final = tl.constexpr(1)
_TO: Final = tl.constexpr(2)
"""Places in the state."""

_BLOCK: Final = 2048
_MOST: Final = 64
"""Programs that fetch, at most."""


@triton.jit
def _letter(letters, count, PROGRAMS: tl.constexpr):
    """Where the letter of this launch lies."""
    return letters + tl.load(count) // PROGRAMS % _LETTERS * _WORDS


@triton.jit
def recipient(letters, state, PROGRAMS: tl.constexpr):
    """The letter of this launch, and where it wants its scores."""
    return _letter(letters, state + _DELIVERED, PROGRAMS), tl.load(state + _TO).to(tl.pointer_type(tl.float32))


@triton.jit
def receipt(letter, state, PROGRAMS: tl.constexpr, TIMED: tl.constexpr):
    """This program has delivered; the last one to do so notes the time."""
    tl.debug_barrier()
    before = tl.atomic_add(state + _DELIVERED, 1, sem="acq_rel")
    if TIMED:  # noqa: SIM102
        if before % PROGRAMS == PROGRAMS - 1:
            tl.store(letter + _ENDED, tl.extra.cuda.globaltimer())


@triton.jit(do_not_specialize=["words"])
def fetch_words(
    letters, state, target, words,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    letter = _letter(letters, state + _FETCHED, PROGRAMS)
    if tl.program_id(0) == 0:
        if TIMED:
            tl.store(letter + _BEGAN, tl.extra.cuda.globaltimer())
        tl.store(state + _TO, tl.load(letter + _SCORES))
    source = tl.multiple_of(tl.load(letter + _INPUTS).to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(words, 4)
    for begin in range(tl.program_id(0) * BLOCK, words, PROGRAMS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words, cache_modifier=".cg"), mask=at < words)
    tl.debug_barrier()
    tl.atomic_add(state + _FETCHED, 1)


def fetch(mail: Mail, words: torch.Tensor) -> None:
    """See `mail.fetch`. Four words are read at a time: both ends are aligned to 16 bytes, and so is the length."""
    assert len(words) % 4 == 0
    programs = min(triton.cdiv(len(words), _BLOCK), _MOST)
    fetch_words[programs,](
        mail.letters, mail.state, words, len(words),
        PROGRAMS=programs, BLOCK=_BLOCK, TIMED=has_tanh(words.device), num_warps=8,
    )  # fmt: skip
