"""No pickled code is ever run: nothing in the package can load any."""

import ast
from pathlib import Path

import relaygr

SOURCES = sorted(Path(relaygr.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle")}


def test_no_module_can_unpickle() -> None:
    assert SOURCES
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if (node.value.id, node.attr) in CALLS:
                    found.append((path.name, node.lineno, f"{node.value.id}.{node.attr}"))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append((path.name, node.lineno, node.func.id))
            found += [(path.name, getattr(node, "lineno", 0), name) for name in names & MODULES]
    assert not found
