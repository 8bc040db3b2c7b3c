"""Every kernel compiles for a Hopper GPU with the Triton that is installed, whether there is such a GPU or not."""

import os
import subprocess
import sys
from pathlib import Path

from optional import require
from relaygr.kernels.device import _has_gluon

KERNELS = {
    "add_product", "add_splits", "attend", "collect_trays", "combine", "embed_candidate_rows", "embed_rows",
    "fetch_words", "gate_rows", "head_rows", "move_words", "norm_rows", "project_rows", "write_pages",
}  # fmt: skip


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    require("triton", "make test")
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(done.stdout.split()) == KERNELS | ({"silu_over_pages"} if _has_gluon() else set())
