"""A device that runs real models with torch: one worker for steps and one for copies, each with its own stream."""

import asyncio
import copy
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash

from relaygr.config import EngineConfig
from relaygr.engine.step import Capacity, Direction, Model, PageCopy, Served, Step, StepResult
from relaygr.errors import InvalidInput
from relaygr.kernels import PageLayout, attention_for
from relaygr.model import AppendBatch, RankingModel, ScoreBatch
from relaygr.model.ranking import EPOCH_TABLES

__all__ = ["TorchExecutor"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchExecutor:
    """Pools of pages as two tensors of one layout, one on the device and one in host memory."""

    def __init__(self) -> None:
        self.depth = 1
        self._layout: PageLayout | None = None
        self._device = torch.device("cpu")
        self._dtype = torch.float32
        self._pages = torch.empty(0)
        self._host_pages = torch.empty(0)
        self._tables: dict[tuple[str, int], bytes] = {}
        """Digests of the tables served under each version and epoch: one epoch means one set of them."""

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        try:
            self._device = torch.device(config.device)
        except RuntimeError as error:
            raise InvalidInput("device", str(error).splitlines()[0]) from error
        if self._device.type == "meta":
            raise InvalidInput("device", "is 'meta', which computes nothing")
        if self._device.type == "cuda" and (self._device.index or 0) >= (seen := torch.cuda.device_count()):
            raise InvalidInput("device", f"is {config.device!r}, and torch sees {seen or 'no'} CUDA devices")
        self._dtype = _DTYPES[config.dtype]
        layout = self._layout_of(_checked(model))
        capacity = Capacity(config.device_bytes // layout.bytes, config.host_bytes // layout.bytes, layout.bytes)
        if not capacity.device:
            raise InvalidInput("device_cache", f"is less than one page of this model, {layout.bytes} bytes")
        self._layout = layout
        field = "device_cache"
        try:
            self._pages = layout.allocate(capacity.device, device=self._device)
            field = "host_cache"
            pinned = self._device.type == "cuda" and capacity.host > 0
            self._host_pages = layout.allocate(capacity.host, pinned=pinned)
        except RuntimeError as error:
            self._pages = torch.empty(0)
            raise InvalidInput(field, f"cannot be allocated: {str(error).splitlines()[0]}") from error
        self._steps = ThreadPoolExecutor(1, "relaygr-steps")
        self._copies = ThreadPoolExecutor(1, "relaygr-copies")
        return capacity

    async def prepare(self, model: Model) -> Served:
        served = await asyncio.get_running_loop().run_in_executor(None, self._prepare, model)
        self._tables[served.version, served.epoch] = _digest_of_tables(served.model)
        return served

    def _prepare(self, model: Model) -> Served:
        """The model, moved, cast and given the device's kernels; the caller's own where nothing is to be cast."""
        model = _checked(model)
        layout = self._layout_of(model)
        if layout != self._layout:
            raise InvalidInput("model", f"has pages of {layout}, this engine's are {self._layout}")
        if model.device != self._device or model.layout.dtype != self._dtype:
            model = copy.deepcopy(model).to(device=self._device, dtype=self._dtype)
        if self._dtype is not torch.float32:  # float32 is for exactness: the definition serves it
            model.stack.attention = attention_for(self._device)
        served = Served(model, model.version(), model.epoch)
        tables = _digest_of_tables(model)
        if self._tables.get((served.version, served.epoch), tables) != tables:
            raise InvalidInput("epoch", f"is {served.epoch}, which was served with other tables: raise it")
        return served

    def _layout_of(self, model: RankingModel) -> PageLayout:
        config = model.config
        return PageLayout(config.layers, config.heads, config.head_dim, self._dtype)

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        return asyncio.get_running_loop().run_in_executor(self._steps, self._run, step)

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        return asyncio.get_running_loop().run_in_executor(self._copies, self._move, copy)

    def close(self) -> None:
        self._steps.shutdown()
        self._copies.shutdown()
        self._pages = self._host_pages = torch.empty(0)
        self._tables.clear()

    def _run(self, step: Step) -> StepResult:
        began = time.perf_counter()
        model = step.served.model
        assert isinstance(model, RankingModel)
        for old, new in step.page_copies:
            self._pages[new].copy_(self._pages[old])
        if step.appends:
            model.append(AppendBatch.pack(model.config, step.appends, self._device), self._pages)
        scores = []
        if step.scores:
            packed = model.score(ScoreBatch.pack(model.config, step.scores, self._device), self._pages)
            ends = np.cumsum([len(row.candidates) for row in step.scores])
            scores = np.split(packed.cpu().numpy(), ends[:-1])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return StepResult(scores, time.perf_counter() - began)

    def _move(self, copy: PageCopy) -> float:
        began = time.perf_counter()
        inward = copy.direction is Direction.IN
        source, target = (self._host_pages, self._pages) if inward else (self._pages, self._host_pages)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # beside the steps; what is copied was complete before, by their own ends
            for old, new in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
                target[new].copy_(source[old], non_blocking=True)
        if stream is not None:
            stream.synchronize()
        return time.perf_counter() - began


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
