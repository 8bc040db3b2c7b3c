"""What a device's kernels may use."""

import functools
import importlib.util

import torch

__all__ = ["can_chain", "chain", "has_tanh", "has_triton", "is_hopper", "multiprocessors"]


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def has_tanh(device: torch.device) -> bool:
    """Whether kernels run on an NVIDIA GPU, whose tanh is written in its assembly."""
    return device.type == "cuda" and torch.version.cuda is not None


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the Gluon kernels run there."""
    if not has_tanh(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def can_chain(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends."""
    return has_tanh(device) and torch.cuda.get_device_capability(device)[0] >= 9


def chain(*, wait: bool, trigger: bool) -> dict[str, bool]:
    """How a kernel is launched that starts while the one before it ends, and that lets the next one start.

    It waits before it reads what the one before writes, and before it writes; it triggers the next after that.
    """
    return {"WAIT": wait, "TRIGGER": trigger, **({"launch_pdl": True} if wait else {})}
