"""What a device's kernels may use."""

import functools
import importlib.util
import inspect

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
    return has_tanh(device) and torch.cuda.get_device_capability(device)[0] == 9 and _has_gluon()


@functools.cache
def _has_gluon() -> bool:
    """Whether Triton comes with Gluon as the kernels speak it: from 3.6 on. It is young, and changes."""
    try:
        from triton.experimental.gluon import language
    except ImportError:
        return False
    return "functions_and_args" in inspect.signature(language.warp_specialize).parameters


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def can_chain(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends: on Hopper and later, with Triton from 3.5 on."""
    if not has_tanh(device) or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    from triton.language.extra import cuda

    return "_semantic" in inspect.signature(cuda.gdc_wait).parameters  # without, Triton cannot compile it


def chain(*, wait: bool, trigger: bool) -> dict[str, bool]:
    """How a kernel is launched that starts while the one before it ends, and that lets the next one start.

    It waits before it reads what the one before writes, and before it writes; it triggers the next after that.
    """
    return {"WAIT": wait, "TRIGGER": trigger, **({"launch_pdl": True} if wait else {})}
