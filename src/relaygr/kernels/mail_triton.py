"""Mail in Triton. Pinned memory of the host is read anew each time: nothing here may come from a cache."""

from typing import Final

import torch
import triton
import triton.language as tl

from relaygr.kernels.device import has_tanh
from relaygr.kernels.mail import BEGAN, ENDED, INPUTS, LETTERS, SCORES, Mail

__all__ = ["fetch", "receipt", "recipient"]

_LETTERS: Final = tl.constexpr(LETTERS)
_INPUTS: Final = tl.constexpr(INPUTS)
_SCORES: Final = tl.constexpr(SCORES)
_BEGAN: Final = tl.constexpr(BEGAN)
_ENDED: Final = tl.constexpr(ENDED)

_BLOCK: Final = 1024
_MOST: Final = 32
"""Programs that fetch, at most."""


@triton.jit
def _letter(letters, count, PROGRAMS: tl.constexpr):
    """Where the letter of this launch lies. `count` is read before any program of it may count itself twice."""
    return letters + tl.load(count, volatile=True) // PROGRAMS % _LETTERS * 4


@triton.jit
def recipient(letters, count, PROGRAMS: tl.constexpr):
    """The letter of this launch, and where it wants its scores."""
    letter = _letter(letters, count, PROGRAMS)
    return letter, tl.load(letter + _SCORES, volatile=True).to(tl.pointer_type(tl.float32))


@triton.jit
def receipt(letter, count, PROGRAMS: tl.constexpr, TIMED: tl.constexpr):
    """This program has delivered; the last one to do so notes the time."""
    tl.debug_barrier()
    before = tl.atomic_add(count, 1, sem="acq_rel")
    if TIMED:  # noqa: SIM102
        if before % PROGRAMS == PROGRAMS - 1:
            tl.store(letter + _ENDED, tl.extra.cuda.globaltimer())


@triton.jit(do_not_specialize=["words"])
def fetch_words(
    letters, count, target, words,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    letter = _letter(letters, count, PROGRAMS)
    if TIMED:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(letter + _BEGAN, tl.extra.cuda.globaltimer())
    source = tl.multiple_of(tl.load(letter + _INPUTS, volatile=True).to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(words, 4)
    for begin in range(tl.program_id(0) * BLOCK, words, PROGRAMS * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words, volatile=True), mask=at < words)
    tl.debug_barrier()
    tl.atomic_add(count, 1)


def fetch(mail: Mail, words: torch.Tensor) -> None:
    """See `mail.fetch`. Four words are read at a time: both ends are aligned to 16 bytes, and so is the length."""
    assert len(words) % 4 == 0
    programs = min(triton.cdiv(len(words), _BLOCK), _MOST)
    fetch_words[programs,](
        mail.letters, mail.counts[:1], words, len(words),
        PROGRAMS=programs, BLOCK=_BLOCK, TIMED=has_tanh(words.device), num_warps=8,
    )  # fmt: skip
