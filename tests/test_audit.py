"""The audit of dependencies, against a service that knows, one that is gone, and one that babbles."""

import contextlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
assert _SPEC is not None
assert _SPEC.loader is not None
audit: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(audit)


@contextlib.contextmanager
def service(known: dict[str, list[str]], *, garbled: bool = False) -> Iterator[str]:
    """One that knows of these, by "name version"."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            names = [f"{query['package']['name']} {query['version']}" for query in asked]
            results: list[Any] = [
                {"vulns": [{"id": one} for one in known[name]]} if name in known else {} for name in names
            ]
            body = b"<html>" if garbled else json.dumps({"results": results}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "constraints.txt"
    path.write_text("# words\nnumpy==2.4.6\nMarkupSafe==3.0.4\n# accepted: GHSA-old-one it is never called here\n")
    return path


def test_every_pin_of_the_project_is_asked_about() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert len(audit.pins(text)) == text.count("==") > 50


def test_a_known_vulnerability_is_named_and_fails(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with service({"numpy 2.4.6": ["GHSA-b", "CVE-a"], "numpy 2.4.5": ["CVE-c"]}) as address:
        assert audit.main([str(file), "--service", address]) == 1
    told = capsys.readouterr().out
    assert "numpy 2.4.6: CVE-a, GHSA-b" in told
    assert "2 versions audited, 1 with known vulnerabilities" in told


def test_none_known_or_all_accepted_is_well(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with service({"MarkupSafe 3.0.4": ["GHSA-old-one"]}) as address:
        assert audit.main([str(file), "--service", address]) == 0
    assert "2 versions audited, 0 with" in capsys.readouterr().out


def test_an_answer_that_cannot_be_read_is_none(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with service({}, garbled=True) as address:
        assert audit.main([str(file), "--service", address]) == 0
    assert capsys.readouterr().out.startswith("NOT AUDITED: ")


def test_without_a_network_it_says_so_and_does_not_fail(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with service({}) as gone:
        pass
    assert audit.main([str(file), "--service", gone]) == 0
    told = capsys.readouterr().out
    assert told.startswith("NOT AUDITED: ")
    assert "audited," not in told
