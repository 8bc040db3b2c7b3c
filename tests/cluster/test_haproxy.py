"""The printed configuration: HAProxy takes it, and it says what the membership and the settings say."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from haproxy_server import checked
from relaygr.cli import app
from relaygr.cluster.haproxy import HaproxyConfig, haproxy
from relaygr.errors import InvalidInput
from relaygr.relay import Membership


def membership(**slots: str) -> Membership:
    members = Membership()
    for slot, address in slots.items():
        members.add(slot.replace("_", "-"), address)
    return members


SLOTS = {f"slot_{number}": f"http://127.0.0.1:{8100 + number}" for number in range(3)}


@pytest.mark.parametrize(
    "config",
    [
        HaproxyConfig(),
        HaproxyConfig(bind="[::1]:9000", lease_s=0.5, load_factor=1.0, check_ms=1, max_body=1),
        HaproxyConfig(bind="*:9000", lease_s=3600, load_factor=2.5, socket="/tmp/haproxy.sock"),
    ],
)
def test_haproxy_takes_it_without_a_warning(tmp_path: Path, config: HaproxyConfig) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(haproxy(membership(**SLOTS, v6="http://[::1]:8100"), config))
    assert checked(file) == ""


def test_haproxy_refuses_one_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(haproxy(membership(**SLOTS)).replace("balance hdr", "balance hat"))
    assert "balance" in checked(file)


def test_a_slot_keeps_its_number_whoever_else_is_there() -> None:
    def numbers(text: str) -> dict[str, str]:
        lines = [line.split() for line in text.splitlines() if line.startswith("    server ")]
        return {line[1]: line[-1] for line in lines}

    all_three, two = (
        numbers(haproxy(membership(**SLOTS))),
        numbers(haproxy(membership(slot_2="http://10.0.0.9:1", slot_0="http://10.0.0.8:1"))),
    )
    assert len(set(all_three.values())) == 3
    assert two == {slot: number for slot, number in all_three.items() if slot != "slot-1"}


def test_it_says_what_the_settings_say() -> None:
    text = haproxy(membership(**SLOTS), HaproxyConfig(lease_s=1.5, load_factor=1.4, max_body=1000, socket="/run/s"))
    for line in ("expire 1500ms", "hash-balance-factor 140", "gt 1000 }", "stats socket /run/s mode 600 level admin"):
        assert line in text
    assert "stats socket" not in haproxy(membership(**SLOTS))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("bind", "8200"),
        ("bind", "0.0.0.0:1 ssl crt x"),
        ("lease_s", 0.0),
        ("lease_s", float("nan")),
        ("load_factor", 0.9),
        ("check_ms", 0),
        ("max_body", 0),
        ("socket", "run/s"),
        ("socket", "/run/a b"),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, bad: object) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        HaproxyConfig(**{field: bad})  # type: ignore[arg-type]


def test_slots_that_cannot_stand_in_one_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"^slot: "):
        haproxy(membership(**{"a b": "http://127.0.0.1:1"}))
    with pytest.raises(InvalidInput, match=r"^gateway.instances.slot-0: "):
        haproxy(membership(slot_0="127.0.0.1"))
    with pytest.raises(InvalidInput, match=r"^gateway.instances: "):
        haproxy(Membership())


def test_the_command_prints_it_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "relaygr.toml"
    file.write_text(
        "[engine]\nlease_s = 3\n[router]\nload_factor = 1.5\n[gateway.instances]\n"
        'slot-0 = "http://127.0.0.1:8100"\nslot-1 = "http://127.0.0.1:8101"\n'
    )
    done = CliRunner().invoke(app, ["haproxy", "--config", str(file), "--bind", "127.0.0.1:8300"])
    assert done.exit_code == 0, done.output
    for line in ("bind 127.0.0.1:8300", "expire 3000ms", "hash-balance-factor 150", "server slot-1 127.0.0.1:8101"):
        assert line in done.output
    printed = tmp_path / "haproxy.cfg"
    printed.write_text(done.output)
    assert checked(printed) == ""
    file.write_text("[gateway]\n")
    refused = CliRunner().invoke(app, ["haproxy", "--config", str(file)])
    assert refused.exit_code != 0
    assert "instances" in refused.output


def test_slots_that_are_given_by_name_are_looked_up_again(tmp_path: Path) -> None:
    text = haproxy(membership(**{"slot-0": "http://slot-0.instances:8100"}))
    assert re.search(r"default-server .* resolvers names$", text, re.MULTILINE)
    assert "parse-resolv-conf" in text
    file = tmp_path / "haproxy.cfg"
    file.write_text(text)
    assert checked(file) == ""
    assert "resolvers" not in haproxy(membership(**SLOTS))
