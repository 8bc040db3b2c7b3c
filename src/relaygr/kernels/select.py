"""Which attention a device runs."""

import torch

from relaygr.kernels.attention import Attention
from relaygr.kernels.device import has_triton
from relaygr.kernels.reference import ReferenceAttention

__all__ = ["attention_for", "replayable"]


def attention_for(device: torch.device | str) -> Attention:
    """The fast kernels on a CUDA device that has Triton, else the definition."""
    if torch.device(device).type == "cuda" and has_triton():
        from relaygr.kernels.triton import TritonAttention

        return TritonAttention()
    return ReferenceAttention()


def replayable(attention: Attention) -> bool:
    """Whether launches of it, once captured, serve other batches: those of the definition are planned on the host."""
    return not isinstance(attention, ReferenceAttention)
