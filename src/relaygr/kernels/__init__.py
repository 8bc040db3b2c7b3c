"""Attention over pages: the definition in plain torch, and the fast form of it."""

from relaygr.kernels.attention import Attention, Silu, Softmax, Weighting
from relaygr.kernels.pages import PageLayout
from relaygr.kernels.ragged import Ragged
from relaygr.kernels.reference import ReferenceAttention
from relaygr.kernels.select import append_grain, attention_for

__all__ = [
    "Attention",
    "PageLayout",
    "Ragged",
    "ReferenceAttention",
    "Silu",
    "Softmax",
    "Weighting",
    "append_grain",
    "attention_for",
]
