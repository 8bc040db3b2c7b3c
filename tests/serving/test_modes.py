"""The modes: each is settings of the real components, and a file can say it."""

from dataclasses import replace
from pathlib import Path

import pytest

from relaygr.config import EngineConfig
from relaygr.relay import TriggerMode
from relaygr.serving.modes import Mode, RelaySettings
from relaygr.serving.settings import Settings, read, render

NEVER, AT_RISK, ALWAYS = TriggerMode.NEVER, TriggerMode.AT_RISK, TriggerMode.ALWAYS
MODES = {
    Mode.FULL: ("none", False, NEVER, True),
    Mode.TRUNCATE: ("none", False, NEVER, True),
    Mode.CACHE: ("extend", True, NEVER, True),
    Mode.RELAY: ("whole", False, AT_RISK, True),
    Mode.RELAY_HOST: ("whole", True, AT_RISK, True),
    Mode.RELAY_HOST_EXTEND: ("extend", True, AT_RISK, True),
    Mode.RANDOM_ROUTING: ("extend", True, AT_RISK, False),
    Mode.ALWAYS_TRIGGER: ("extend", True, ALWAYS, True),
    Mode.NEVER_TRIGGER: ("extend", True, NEVER, True),
}


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_says_what_is_reused_where_when_signalled_and_how_routed(mode: Mode) -> None:
    settings = Settings(relay=RelaySettings(mode)).in_mode
    host = settings.engine.host_bytes > 0
    assert (settings.engine.reuse, host, settings.trigger.mode, settings.router.affinity) == MODES[mode]


def test_full_and_truncate_decide_what_a_late_rank_gets_and_the_others_leave_it() -> None:
    cut = EngineConfig(on_miss="truncate")
    assert Mode.FULL.engine(cut).on_miss == "full"
    assert Mode.TRUNCATE.engine(EngineConfig()).on_miss == "truncate"
    assert Mode.CACHE.engine(cut).on_miss == "truncate"


@pytest.mark.parametrize("mode", Mode)
def test_a_file_says_the_mode_and_nothing_else_changes_for_it(mode: Mode, tmp_path: Path) -> None:
    settings = replace(Settings(), relay=RelaySettings(mode))
    (tmp_path / "file").write_text(render(settings))
    assert read(tmp_path / "file") == settings
    assert read(None, {"relay": {"mode": mode.value}}).in_mode == settings.in_mode
