"""What a device's kernels may use."""

import functools
import importlib.util

import torch

__all__ = ["has_tanh", "is_hopper", "launch_options", "multiprocessors", "overlaps"]


def has_tanh(device: torch.device) -> bool:
    """Whether kernels run on an NVIDIA GPU, whose tanh is written in its assembly."""
    return device.type == "cuda" and torch.version.cuda is not None


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it ends; it waits for that one's results itself."""
    return has_tanh(device) and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Options of every launch: those of an overlapped one, where the device can. The kernel waits if OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the Gluon kernels run there."""
    if not has_tanh(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
