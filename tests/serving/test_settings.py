"""The file that configures servers: read, refused by name, written, and read again; and a gateway started with one."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from relaygr.cascade import Catalogue, PipelineConfig
from relaygr.cli import app
from relaygr.config import EngineConfig
from relaygr.errors import InvalidInput
from relaygr.history import LmdbStore, SteppedWindow
from relaygr.model import build_model, checkpoint
from relaygr.relay import RouterConfig, TriggerConfig
from relaygr.serving.all import DEFAULTS
from relaygr.serving.settings import DataSettings, GatewaySettings, InstanceSettings, Settings, mistakes, read, render

ROOT = Path(__file__).parent.parent.parent


def written(folder: Path, text: str) -> Path:
    path = folder / "relaygr.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        read(written(folder, text))
    return caught.value


# ---- the default file


def test_the_printed_file_reads_back_as_the_defaults(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["config"])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == render()
    assert read(written(tmp_path, printed.stdout)) == Settings()
    assert read() == Settings()


def test_serve_all_s_own_defaults_can_be_printed_too(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["config", "--serve-all"])
    assert read(written(tmp_path, printed.stdout)) == DEFAULTS
    assert Settings() != DEFAULTS


def test_every_field_of_every_component_is_a_key_with_a_comment_or_is_filled_in() -> None:
    told_elsewhere = {
        ("trigger", "ranking_budget_ms"),
        ("trigger", "mode"),
        ("router", "affinity"),
        ("engine", "reuse"),
    }
    lines = render().splitlines()
    keys = {line.lstrip("# ").partition(" =")[0]: number for number, line in enumerate(lines) if " = " in line}
    for section in fields(Settings):
        component = getattr(Settings(), section.name)
        for each in fields(component):
            if is_dataclass(getattr(component, each.name)) or (section.name, each.name) == ("gateway", "instances"):
                assert f"[{section.name}.{each.name}]" in lines
            elif (section.name, each.name) not in told_elsewhere:
                words = {
                    "ranking_ms": "ranking_budget_ms",
                    "pipeline_ms": "pipeline_budget_ms",
                    "lease_share": "memory_share",
                    "pre_infer_share": "device_time_share",
                }
                number = keys[words.get(each.name, each.name)]
                assert re.match(r"# \S", lines[number - 1]), f"{section.name}.{each.name} needs a sentence under it"


def test_the_file_speaks_the_operator_s_words_and_has_one_ranking_budget() -> None:
    text = render()
    for word in ("ranking_budget_ms", "pipeline_budget_ms", "quantile", "memory_share", "device_time_share"):
        assert len(re.findall(rf"^{word} = ", text, re.MULTILINE)) == 1, word
    assert "lease_share" not in text
    assert "None" not in text


# ---- what a file says


def test_sections_reach_the_components_they_are_about(tmp_path: Path) -> None:
    file = """
        [cascade]
        ranking_budget_ms = 30
        window = {cap = 4096, step = 512}
        [trigger]
        quantile = 0.95
        [engine]
        memory_share = 0.5
        device_time_share = 0.25
        max_history = 9000
        [data]
        model = "m.safetensors"
        [gateway.instances]
        slot-0 = "http://10.0.0.1:8100"
    """
    settings = read(written(tmp_path, file))
    assert settings.cascade == PipelineConfig(ranking_ms=30.0, window=SteppedWindow(4096, 512))
    assert settings.trigger == TriggerConfig(quantile=0.95, ranking_budget_ms=30.0)
    assert settings.engine == EngineConfig(lease_share=0.5, pre_infer_share=0.25, max_history=9000)
    assert settings.data.need("model") == "m.safetensors"
    assert settings.gateway.instances == {"slot-0": "http://10.0.0.1:8100"}


def test_the_trigger_has_the_cascade_s_ranking_budget_whatever_it_was_given() -> None:
    settings = Settings(cascade=PipelineConfig(ranking_ms=20.0), trigger=TriggerConfig(ranking_budget_ms=99.0))
    assert settings.trigger.ranking_budget_ms == 20.0


def test_overrides_come_before_the_file_and_the_file_before_the_base(tmp_path: Path) -> None:
    path = written(tmp_path, "[gateway]\nport = 1\ndrain_s = 3")
    base = Settings(gateway=GatewaySettings(host="::1", port=9))
    settings = read(path, {"gateway": {"port": 2, "host": None}, "engine": {"device": "cuda"}}, base)
    assert settings.gateway == GatewaySettings(host="::1", port=2, drain_s=3.0)
    assert settings.engine.device == "cuda"


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@given(
    slot=NAMES,
    store=NAMES,
    slots=st.dictionaries(NAMES, st.integers(1, 65535).map(lambda port: f"http://h:{port}"), max_size=3),
    port=st.integers(0, 65535),
    load_factor=st.floats(1, 1e300),
    threads=st.none() | st.integers(1, 2**62),
)
def test_whatever_settings_are_written_are_read_again(
    slot: str,
    store: str,
    slots: dict[str, str],
    port: int,
    load_factor: float,
    threads: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    settings = Settings(
        router=RouterConfig(load_factor=load_factor),
        data=DataSettings(store=store),
        instance=InstanceSettings(slot=slot, port=port, threads=threads),
        gateway=GatewaySettings(instances=slots),
    )
    assert read(written(tmp_path_factory.getbasetemp(), render(settings))) == settings


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("[cascades]", "cascades", "did you mean cascade?"),
        ("[trigger]\nquantil = 0.9", "trigger.quantil", "did you mean quantile?"),
        ("[trigger]\nranking_budget_ms = 5", "trigger.ranking_budget_ms", "belongs in [cascade]"),
        ("[engine]\nlease_share = 0.5", "engine.lease_share", "did you mean memory_share?"),
        ("[cascade]\ncap = 128", "cascade.cap", "belongs in [cascade.window]"),
        ("quantile = 0.9", "quantile", "belongs in [trigger]"),
        ("[router]\nzzz = 1", "router.zzz", "there are load_factor, quiet_tokens"),
        ("[cascade.window]\nstepp = 1", "cascade.window.stepp", "did you mean step?"),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest_known_name(
    tmp_path: Path, text: str, name: str, says: str
) -> None:
    error = refused(tmp_path, text)
    assert error.field == name
    assert says in error.problem


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("cascade = 3", "cascade", "must be a table"),
        ("[cascade]\nwindow = 3", "cascade.window", "must be a table"),
        ('[cascade]\ncandidates = "512"', "cascade.candidates", "must be an integer, not '512'"),
        ("[cascade]\ncandidates = 5.5", "cascade.candidates", "must be an integer"),
        ("[cascade]\ncandidates = true", "cascade.candidates", "must be an integer, not true"),
        ("[cascade]\npipeline_budget_ms = [1]", "cascade.pipeline_budget_ms", "must be a number"),
        (f"[engine]\nlease_s = {10**400}", "engine.lease_s", "must be a number"),
        (f"[engine]\nmax_ranks = {2**63}", "engine.max_ranks", "must fit 64 bits"),
        ("[engine]\ndevice_cache = 5", "engine.device_cache", "must be text in quotes"),
        ("[engine]\non_miss = 5", "engine.on_miss", "must be text in quotes"),
        ("[engine]\ncanary = 1", "engine.canary", "must be true or false, not 1"),
        ("[relay]\nmode = 5", "relay.mode", "must be text in quotes"),
        ("[engine]\nmax_history = 1979-05-27", "engine.max_history", "must be an integer"),
        ("[gateway.instances]\na = 5", "gateway.instances.a", "must be text in quotes"),
        ("[gateway]\ninstances = []", "gateway.instances", "must be a table"),
    ],
)
def test_a_wrong_type_is_refused_by_section_and_key(tmp_path: Path, text: str, name: str, says: str) -> None:
    error = refused(tmp_path, text)
    assert error.field == name
    assert says in error.problem


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("[cascade]\nranking_budget_ms = 500", "cascade.ranking_budget_ms", "less than pipeline_budget_ms, 135"),
        ("[cascade]\nretrieve = 10", "cascade.retrieve", "at least candidates"),
        ("[cascade.window]\nstep = 100", "cascade.window.step", "multiple of the page"),
        ("[trigger]\nquantile = 1", "trigger.quantile", "between 0 and 1"),
        ('[relay]\nmode = "sometimes"', "relay.mode", "choose from full"),
        ("[router]\nload_factor = nan", "router.load_factor", "must be finite"),
        ("[engine]\nmemory_share = 1.5", "engine.memory_share", "at most 1"),
        ("[engine]\ndevice_time_share = 0", "engine.device_time_share", "above 0"),
        ('[engine]\nhost_cache = "much"', "engine.host_cache", "write a size"),
        ('[engine]\non_miss = "cry"', "engine.on_miss", "choose from full, truncate"),
        ("[instance]\nport = 70000", "instance.port", "from 0 to 65535"),
        ('[instance]\nslot = ""', "instance.slot", "must not be empty"),
        ("[instance]\ndrain_s = inf", "instance.drain_s", "finite"),
        ("[instance]\nthreads = 0", "instance.threads", "at least 1"),
        ('[gateway]\nhost = ""', "gateway.host", "must not be empty"),
        ("[gateway]\ncandidate_features = -1", "gateway.candidate_features", "must not be negative"),
        ('[data]\nstore = ""', "data.store", "leave it out"),
        ('[gateway.instances]\n"" = "http://h:1"', "gateway.instances", "without a name"),
    ],
)
def test_a_value_that_its_component_refuses_is_named_in_the_file_s_words(
    tmp_path: Path, text: str, name: str, says: str
) -> None:
    error = refused(tmp_path, text)
    assert error.field == name
    assert says in error.problem


@pytest.mark.parametrize(
    "address", ["10.0.0.1:8100", "https://h:1", "http://h", "http://h:x", "http://h:0", "http://h:1/v1", ""]
)
def test_an_address_that_is_none_is_refused_with_an_example(tmp_path: Path, address: str) -> None:
    error = refused(tmp_path, f'[gateway.instances]\nslot-0 = "{address}"')
    assert error.field == "gateway.instances.slot-0"
    assert "http://127.0.0.1:8100" in error.problem


def test_a_file_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.toml: cannot be read: No such file"):
        read(tmp_path / "none.toml")
    assert "is not TOML" in refused(tmp_path, "[cascade").problem
    path = tmp_path / "latin.toml"
    path.write_bytes(b"[data]\nmodel = '\xe9'")
    with pytest.raises(InvalidInput, match="is not TOML"):
        read(path)


def test_a_path_that_no_file_can_hold_is_refused_when_written() -> None:
    with pytest.raises(InvalidInput, match="not Unicode"):
        render(Settings(data=DataSettings(store=os.fsdecode(b"\xff"))))


# ---- the commands


def test_check_says_that_a_file_is_fine_or_what_is_wrong(tmp_path: Path) -> None:
    path = written(tmp_path, "[trigger]\nquantile = 0.9")
    fine = CliRunner().invoke(app, ["config", "--check", str(path)])
    assert (fine.exit_code, fine.stdout) == (0, f"{path} is fine.\n")
    written(tmp_path, "[trigger]\nranking_budget_ms = 1")
    wrong = CliRunner().invoke(app, ["config", "--check", str(path)])
    assert wrong.exit_code == 1
    assert "trigger.ranking_budget_ms: is no key; ranking_budget_ms belongs in [cascade]" in wrong.stderr


def test_check_says_everything_that_is_wrong_each_in_a_line(tmp_path: Path) -> None:
    text = """
[cascade]
pipeline_budget_ms = "135"
[engine]
device = "tpu"
dtype = "float64"
devise = "cpu"
lease_s = 3
[gateway]
port = 70000
[engines]
"""
    said = CliRunner().invoke(app, ["config", "--check", str(written(tmp_path, text))])
    assert said.exit_code == 1
    assert [line.split(": ")[1] for line in said.stderr.splitlines()] == [
        "cascade.pipeline_budget_ms",
        "engine.devise",
        "engine.device",
        "engine.dtype",
        "gateway.port",
        "engines",
    ]
    assert 'engine.device: is "tpu"; choose from cpu, cuda' in said.stderr


def test_a_file_that_cannot_be_read_is_one_mistake(tmp_path: Path) -> None:
    assert [error.field for error in mistakes(tmp_path / "nothing")] == [str(tmp_path / "nothing")]
    assert "is not TOML" in mistakes(written(tmp_path, "["))[0].problem


def test_a_file_for_serve_all_is_checked_over_its_defaults(tmp_path: Path) -> None:
    path = str(written(tmp_path, "[cascade]\nranking_budget_ms = 200"))
    assert CliRunner().invoke(app, ["config", "--check", path]).exit_code == 1
    assert CliRunner().invoke(app, ["config", "--check", path, "--serve-all"]).exit_code == 0


@pytest.mark.parametrize(
    ("command", "text", "says"),
    [
        (["all"], '[gateway.instances]\na = "http://h:1"', "gateway.instances: are for `serve gateway`"),
        (
            ["all", "--ranking-budget-ms", "9000"],
            "",
            "cascade.ranking_budget_ms: must be less than pipeline_budget_ms",
        ),
        (["instance"], "", "data.model: is not set"),
        (["instance", "--slot", ""], "", "instance.slot: must not be empty"),
        (["gateway"], "", "gateway.instances: names none"),
        (["gateway"], '[gateway.instances]\na = "http://h:1"', "data.store: is not set"),
        (["gateway"], "[gateway]\nports = 1", "gateway.ports: is no key; did you mean port?"),
    ],
)
def test_a_server_that_is_told_nonsense_says_what_to_do_and_does_not_start(
    tmp_path: Path, command: list[str], text: str, says: str
) -> None:
    data = ["--data-dir", str(tmp_path / "data")] if command[0] == "all" else []
    result = CliRunner().invoke(app, ["serve", *command, *data, "--config", str(written(tmp_path, text))])
    assert result.exit_code == 1
    assert says in result.stderr
    assert not (tmp_path / "data").exists()


def test_the_examples_of_the_document_are_fine(tmp_path: Path) -> None:
    document = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```toml\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        assert read(written(tmp_path, example)) != Settings()
        assert tomllib.loads(example)


# ---- a gateway over an instance, each with a file


@contextmanager
def serving(folder: Path, what: str, settings: Settings) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """The running command and its address."""
    file = folder / f"{what}.toml"
    file.write_text(render(settings), encoding="utf-8")
    with (folder / f"{what}.stderr").open("w") as errors:
        command = [sys.executable, "-m", "relaygr", "serve", what, "--config", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            serves = re.search(r"serves on (\S+)", process.stdout.readline())
            assert serves, (folder / f"{what}.stderr").read_text()
            yield process, serves[1]
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_gateway_alone_serves_over_the_instance_its_file_names_and_drains_on_sigterm(tmp_path: Path) -> None:
    model = build_model("hstu", layers=1, dim=16, heads=2, items=64, seed=0)
    checkpoint.save(model, tmp_path / "model")
    Catalogue.random(64, 8, seed=0).save(tmp_path / "items")
    with LmdbStore(tmp_path / "store") as store:
        store.append("u", [1, 2, 3], [0, 0, 0], [1, 2, 3])
    settings = Settings(
        cascade=PipelineConfig(pipeline_ms=60_000, ranking_ms=50_000),  # nothing here is about time
        engine=EngineConfig(device_cache="8MiB", host_cache="0"),
        data=DataSettings(*(str(tmp_path / name) for name in ("model", "items", "store"))),
        instance=InstanceSettings(slot="a b", port=0, threads=1),
    )
    with ExitStack() as stack:
        instance, behind = stack.enter_context(serving(tmp_path, "instance", settings))
        gateway = replace(settings, gateway=GatewaySettings(port=0, instances={"a b": behind}))
        process, address = stack.enter_context(serving(tmp_path, "gateway", gateway))
        client = stack.enter_context(httpx.Client(base_url=address, timeout=60))
        until = time.monotonic() + 60
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < until
        answer = client.post("/v1/recommend", json={"user": "u", "k": 3}).json()
        assert (answer["instance"], answer["used"], len(answer["items"])) == ("a b", 3, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert instance.poll() is None  # it is not the gateway's to end
        instance.send_signal(signal.SIGTERM)
        assert instance.wait(timeout=30) == 0
