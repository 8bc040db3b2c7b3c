"""Kernels run on the GPU where there is one, else in Triton's interpreter, chosen before Triton is loaded."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
