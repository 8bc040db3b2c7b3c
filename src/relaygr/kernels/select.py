"""Which attention a device runs."""

import torch

from relaygr.history import PAGE
from relaygr.kernels.attention import Attention
from relaygr.kernels.device import has_triton, multiprocessors
from relaygr.kernels.pages import PageLayout
from relaygr.kernels.reference import ReferenceAttention

__all__ = ["append_grain", "attention_for", "replayable"]


def attention_for(device: torch.device | str) -> Attention:
    """The fast kernels on a CUDA device that has Triton, else the definition."""
    if torch.device(device).type == "cuda" and has_triton():
        from relaygr.kernels.triton import TritonAttention

        return TritonAttention()
    return ReferenceAttention()


def append_grain(attention: Attention, layout: PageLayout, device: torch.device) -> int:
    """Tokens of which each multiprocessor gets a page of one head, where an append works through its keys so: with the
    Hopper kernel. Rounded down to a power of two, which launches are captured for. A page elsewhere."""
    if isinstance(attention, ReferenceAttention) or not has_triton():
        return PAGE
    from relaygr.kernels.triton import TritonAttention

    if not isinstance(attention, TritonAttention) or not attention.takes_hopper(device, layout.head_dim, layout.dtype):
        return PAGE
    return PAGE << ((multiprocessors(device) // layout.heads | 1).bit_length() - 1)


def replayable(attention: Attention) -> bool:
    """Whether launches of it, once captured, serve other batches: those of the definition are planned on the host."""
    return not isinstance(attention, ReferenceAttention)
