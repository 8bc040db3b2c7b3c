"""An instance ends with whoever started it."""

import os
import select
import subprocess
import sys
from pathlib import Path


def test_a_parent_that_is_killed_takes_its_instance_along(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('[engine]\ndevice = "simulated"\n[instance]\nport = 0\n')
    code = """
import os, subprocess, sys
command = [sys.executable, "-m", "relaygr", "serve", "instance", "--config", sys.argv[1], "--parent", str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
print(child.stdout.readline().decode().split()[-1], child.pid, flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        address, pid = parent.stdout.readline().split()
        assert address.startswith("http://")
        instance = os.pidfd_open(int(pid))
        parent.kill()
    assert select.select([instance], [], [], 60)[0], "it lives on"
    os.close(instance)


def test_a_parent_that_has_gone_already_is_noticed() -> None:
    code = "from relaygr.serving.parent import end_with; end_with(1)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "whoever started this process has ended" in ended.stderr
