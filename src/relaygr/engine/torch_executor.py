"""A device that runs real models with torch: it holds the pages of both tiers and the models as they are served."""

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Final

import torch
import xxhash
from torch import nn

from relaygr.config import EngineConfig, Tables
from relaygr.engine.cpu_runner import CpuRunner
from relaygr.engine.hot_rows import HotRowCache
from relaygr.engine.limits import longest_pages, max_history
from relaygr.engine.runner import Runner
from relaygr.engine.step import Capacity, Model, PageCopy, Progress, Served, Step, StepResult, no_progress
from relaygr.engine.waiting import until_done
from relaygr.errors import InvalidInput
from relaygr.history import PAGE
from relaygr.kernels import PageLayout, append_grain, attention_for
from relaygr.model import RankingModel
from relaygr.model.ranking import EPOCH_TABLES

__all__ = ["TorchExecutor"]

_HOT_BYTES = 1 << 30
"""Of device memory for the rows in demand, where a table lies in host memory."""
_PREPARING: Final = threading.RLock()
"""Held by the engine of this process that prepares a model: torch frees no memory, on any device, while it captures."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchExecutor:
    """Pools of pages as two tensors of one layout, one on the device and one in host memory."""

    def __init__(self, progress: Progress = no_progress) -> None:
        self._progress = progress
        self._layout: PageLayout | None = None
        self._device = torch.device("cpu")
        self._dtype = torch.float32
        self._where: Tables = "auto"
        self._runner: Runner
        self._close_host: Callable[[], None] = lambda: None
        self._host_ready: Callable[[], int] = lambda: 0
        self._tables: dict[tuple[str, int], bytes] = {}
        """Digests of the tables served under each version and epoch: one epoch means one set of them."""

    @property
    def depth(self) -> int:
        return self._runner.depth

    @property
    def host_pages(self) -> int:
        return self._host_ready()

    def facts(self) -> dict[str, float]:
        return self._runner.facts()

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        self._device = _device_of(config.device)
        self._dtype = _DTYPES[config.dtype]
        self._where = config.tables
        layout = self._layout_of(_checked(model))
        device_bytes = config.device_bytes(lambda: _free_bytes(self._device, _checked(model), self._dtype))
        capacity = Capacity(device_bytes // layout.bytes, config.host_bytes // layout.bytes, layout.bytes)
        if not capacity.device:
            raise InvalidInput("device_cache", f"is less than one page of this model, {layout.bytes} bytes")
        longest = longest_pages(max_history(config, capacity))
        self._layout = layout
        try:
            pages = layout.allocate(capacity.device, device=self._device)
        except RuntimeError as error:
            raise InvalidInput("device_cache", f"cannot be allocated: {str(error).splitlines()[0]}") from error
        if self._device.type == "cuda":
            self._open_gpu(layout, pages, capacity.host, longest, canary=config.canary)
        else:
            try:
                host_pages = layout.allocate(capacity.host)
            except RuntimeError as error:
                raise InvalidInput("host_cache", f"cannot be allocated: {str(error).splitlines()[0]}") from error
            self._host_ready = lambda: capacity.host
            self._runner = CpuRunner(pages, host_pages, canary=config.canary)
        return capacity

    def _open_gpu(
        self, layout: PageLayout, pages: torch.Tensor, host_pages: int, longest: int, *, canary: bool
    ) -> None:
        """Pin the host tier and start a runner: both or neither."""
        from relaygr.engine.cuda_runner import CudaRunner
        from relaygr.engine.pinned import PinnedPages

        host = PinnedPages(layout, host_pages, pages.device, self._progress)
        try:
            self._runner = CudaRunner(pages, host, longest, canary=canary)
        except BaseException:
            host.close()
            raise
        self._host_ready, self._close_host = lambda: host.ready, host.close

    async def prepare(self, model: Model) -> Served:
        preparing = asyncio.get_running_loop().run_in_executor(None, self._prepare, model)
        cancelled = await until_done(preparing)  # a thread: whoever is told that this ended may close the device
        served, tables = preparing.result()
        if cancelled is not None:
            raise cancelled
        self._tables[served.version, served.epoch] = tables
        return served

    def _prepare(self, model: Model) -> tuple[Served, bytes]:
        """The model, moved, cast and given the device's kernels; the caller's own where nothing is to be cast.

        With the digest of its tables.
        """
        with _PREPARING:
            return self._prepare_alone(_checked(model))

    def _prepare_alone(self, model: RankingModel) -> tuple[Served, bytes]:
        layout = self._layout_of(model)
        if layout != self._layout:
            raise InvalidInput("model", f"has pages of {layout}, this engine's are {self._layout}")
        hot = None
        if self._table_on_host(model):
            model, hot = _with_table_on_host(model, self._device, self._dtype)
        elif model.device != self._device or model.layout.dtype != self._dtype:
            model = copy.deepcopy(model).to(device=self._device, dtype=self._dtype)
        if self._dtype is not torch.float32:  # float32 is for exactness: the definition serves it
            model.stack.attention = attention_for(self._device)
        hstu = model.config.family == "hstu"
        grain = append_grain(model.stack.attention, layout, self._device) if hstu else PAGE
        served = Served(model, model.version(), model.epoch, grain, self._runner.trays(model))
        tables = _digest_of_tables(model)
        if self._tables.get((served.version, served.epoch), tables) != tables:
            raise InvalidInput("epoch", f"is {served.epoch}, which was served with other tables: raise it")
        self._runner.serve(served, hot, self._progress)
        return served, tables

    def _table_on_host(self, model: RankingModel) -> bool:
        if self._device.type != "cuda" or self._where == "device":
            return False
        table = model.embedding.table.numel() * self._dtype.itemsize
        return self._where == "host" or table > _free_now(self._device) / 2

    def _layout_of(self, model: RankingModel) -> PageLayout:
        config = model.config
        return PageLayout(config.layers, config.heads, config.head_dim, self._dtype)

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        return self._runner.launch(step)

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        return self._runner.copy(copy)

    def close(self) -> None:
        self._runner.close()
        del self._runner
        self._close_host()
        self._close_host, self._host_ready = lambda: None, lambda: 0
        self._tables.clear()


def _device_of(name: str) -> torch.device:
    if name == "simulated":
        raise InvalidInput("device", "is simulated, which runs no real model: choose cpu or cuda")
    device = torch.device(name)
    if device.type == "cuda":
        if (device.index or 0) >= (seen := torch.cuda.device_count()):
            raise InvalidInput("device", f"is {name!r}, and torch sees {seen or 'no'} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return device


def _free_bytes(device: torch.device, model: RankingModel, dtype: torch.dtype) -> int:
    """Memory of the device that is free once the model is there."""
    if device.type != "cuda":
        raise InvalidInput("device_cache", 'is a share of free memory, which only a CUDA device has: write "4GiB"')
    weights = 0 if model.device == device else sum(each.numel() for each in model.parameters()) * dtype.itemsize
    return max(_free_now(device) - weights, 0)


def _free_now(device: torch.device) -> int:
    """Memory of the device that is free, with what torch holds and does not use, of models served before say."""
    if _PREPARING.acquire(blocking=False):  # while another engine captures, what torch holds counts as used
        try:
            with contextlib.suppress(RuntimeError):  # and where a capture has failed, for good
                torch.cuda.empty_cache()
        finally:
            _PREPARING.release()
    return torch.cuda.mem_get_info(device)[0]


def _with_table_on_host(
    model: RankingModel, device: torch.device, dtype: torch.dtype
) -> tuple[RankingModel, HotRowCache]:
    """The model on the device but for its table, which is pinned in host memory, and a cache of the table's rows."""
    table = model.embedding.table
    moved = copy.deepcopy(model, {id(table): nn.Parameter(table.new_empty(0))}).to(device=device, dtype=dtype)
    pinned = torch.empty(table.shape, dtype=dtype, pin_memory=True).copy_(table.detach())
    moved.embedding.table = nn.Parameter(pinned, requires_grad=False)
    row_bytes = table.shape[1] * dtype.itemsize
    hot = HotRowCache(pinned, max(1, min(len(table), _HOT_BYTES // row_bytes)), device)
    moved.embedding.hot = hot.rows
    return moved, hot


def _checked(model: Model) -> RankingModel:
    if not isinstance(model, RankingModel):
        raise InvalidInput("model", f"must be a RankingModel, not {type(model).__name__}")
    return model


def _digest_of_tables(model: Model) -> bytes:
    assert isinstance(model, RankingModel)
    digest = xxhash.xxh3_128()
    for name in sorted(EPOCH_TABLES):
        digest.update(model.get_parameter(name).detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
