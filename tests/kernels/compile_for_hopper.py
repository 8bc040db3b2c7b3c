"""Compiles every kernel for a Hopper GPU, whether there is one or not: launches end when their kernel is compiled.

The Triton that is installed decides whether that works, and its languages change. Run by a test, in a process of its
own, since kernels are interpreted in the others. Prints the kernels' names.
"""

import sys

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from relaygr.kernels import device


class NoDevice:
    """What Triton asks of a device before it runs anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: set[str] = set()


def compile_only(kernel, grid):  # type: ignore[no-untyped-def]
    def launch(*args, **options):  # type: ignore[no-untyped-def]
        kernel.warmup(*args, grid=grid, **options)
        compiled.add(kernel.__name__)

    return launch


driver.set_active(NoDevice())
JITFunction.__getitem__ = compile_only
torch.cuda.get_device_capability = lambda _=None: (9, 0)  # type: ignore[assignment]
device.has_tanh = lambda device: True
device.multiprocessors = lambda _: 132  # type: ignore[assignment]

# Everything that takes a name from `device` is imported behind this.
from relaygr.engine.buckets import Bucket  # noqa: E402
from relaygr.engine.graphs import _bound  # noqa: E402
from relaygr.history import History  # noqa: E402
from relaygr.kernels import ends, layer, move_triton  # noqa: E402
from relaygr.kernels.mail import Inputs, Mail, collect, fetch  # noqa: E402
from relaygr.kernels.triton import TritonAttention  # noqa: E402
from relaygr.model import AppendBatch, Candidates, ScoreBatch, build_model  # noqa: E402
from relaygr.model.batch import AppendRow, ScoreRow  # noqa: E402
from relaygr.model.config import Family  # noqa: E402
from relaygr.model.packed import Packed  # noqa: E402

layer._fused = ends._fused = lambda *_: True  # type: ignore[assignment]


def compile_model(family: Family, *, hopper: bool) -> None:
    TritonAttention._fits_hopper = lambda *_: hopper  # type: ignore[method-assign]
    length = 1024.0 if family == "hstu" else None
    model = build_model(family, layers=2, dim=256, heads=2, items=100, seed=0, scale_length=length).to(torch.bfloat16)
    model.stack.attention = TritonAttention()
    pages = model.layout.allocate(128)
    for count in (300, 16000) if hopper else (300,):  # an append that is split, and one that is not
        history = History(np.arange(count) % 100, np.zeros(count, int), np.arange(count))
        row = AppendRow(history, np.empty(0, np.int64), 0, count, range(count // 128 + 1))
        model.append(AppendBatch.pack(model.config, [row]), pages)
    scored = ScoreRow(Candidates(np.arange(50)), None, 300, 300, range(3))
    model.score(ScoreBatch.pack(model.config, [scored]), pages)
    bucket = Bucket(4, 128)
    new = Packed.empty(bucket.shape(8, None))
    fetch(Mail.make("cpu"), new.words)
    model.append(AppendBatch(new.tokens, _bound(bucket, new)), pages)
    for features in (3, 0):
        mail, to = Mail.make("cpu", bucket.users), Packed.empty(bucket.shape(8, features))
        collect(mail, Inputs(to.starts, to.cached, to.positions, to.table, to.items, to.dense))
    model.score(ScoreBatch(to.items, to.positions, None, _bound(bucket, to)), pages, None, mail)


if __name__ == "__main__":
    with torch.inference_mode():
        if device.is_hopper(torch.device("cpu")):  # by the Triton that is installed
            compile_model("hstu", hopper=True)
        compile_model("hstu", hopper=False)
        compile_model("softmax", hopper=False)
        one = torch.zeros(1, dtype=torch.int32)
        move_triton.move_pages(torch.zeros(2, 2, 4096), torch.zeros(2, 2, 4096), one, one, 0, 2)
    sys.stdout.write(" ".join(sorted(compiled)))
