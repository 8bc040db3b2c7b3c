"""A gateway and an instance as processes, for whatever may be done to them, and what they hold meanwhile."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaygr.cascade.catalogue import Catalogue
from relaygr.history import open_store

__all__ = ["Server", "servers", "started"]


@dataclass
class Server:
    """One of them."""

    name: str
    address: str
    process: "subprocess.Popen[str]"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def memory(self) -> int:
        """Bytes it holds in memory, with its children."""
        return sum(_resident(pid) for pid in self._family())

    def descriptors(self) -> int:
        return sum(1 for pid in self._family() for _ in Path(f"/proc/{pid}/fd").iterdir())

    def _family(self) -> list[int]:
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [own, *map(int, children)]


def _resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


@contextlib.contextmanager
def servers(folder: Path, store_name: str | None = None, gateway: str = "") -> Iterator[dict[str, Server]]:
    """An instance of a simulated device, and a gateway in front of it, with a store that both read.

    `gateway`: more lines for its section of the file.
    """
    store_name = store_name or str(folder / "store")
    draw = np.random.default_rng(0)
    Catalogue(np.arange(1000), draw.normal(size=(1000, 8)).astype(np.float32)).save(folder / "items.safetensors")
    with open_store(store_name) as store:
        for user in range(5):
            times = np.cumsum(draw.integers(1, 900, 500))
            store.append(f"user-{user}", draw.integers(0, 1000, 500), draw.integers(0, 16, 500), times)
    file = folder / "relaygr.toml"
    file.write_text(
        f'[engine]\ndevice = "simulated"\n[data]\nstore = "{store_name}"\ncatalogue = "{folder}/items.safetensors"\n'
        f"[instance]\nport = 0\n[gateway]\nport = 0\n{gateway}"
        "[cascade]\npipeline_budget_ms = 20000\nranking_budget_ms = 10000\n"
    )
    with contextlib.ExitStack() as stack:
        instance = started("instance", file, stack)
        with file.open("a") as more:
            more.write(f'[gateway.instances]\nslot-0 = "{instance.address}"\n')
        yield {"instance": instance, "gateway": started("gateway", file, stack)}


def started(name: str, file: Path, stack: contextlib.ExitStack) -> Server:
    """One more of this kind, ended with the stack."""
    command = [sys.executable, "-m", "relaygr", "serve", name, "--config", str(file)]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    serves = re.search(r"serves on (\S+)", process.stdout.readline())
    assert serves, f"the {name} did not start"
    return Server(name, serves[1], process)
