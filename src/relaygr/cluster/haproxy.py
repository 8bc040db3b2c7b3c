"""HAProxy in front of instances: a configuration that does what the router does, from the same membership.

    sender ── x-relaygr-key ──▶ HAProxy ─┬─ consistent hash, bounded load ──▶ slot
                                         └─ seen within a lease: the same slot ┘

For cascades of your own: the gateway of this project routes by itself. HAProxy 2.8 or newer.
"""

import ipaddress
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from relaygr.errors import InvalidInput
from relaygr.relay import Membership
from relaygr.serving.instance import MAX_BODY
from relaygr.shown import shown

__all__ = ["HaproxyConfig", "haproxy"]


@dataclass(frozen=True)
class HaproxyConfig:
    """What a configuration says beside the slots."""

    bind: str = "127.0.0.1:8200"
    """The address and port to listen on; loopback unless told otherwise."""
    lease_s: float = 2.0
    """How long a user's messages go where the last one went: as long as instances keep a prefix for its rank."""
    load_factor: float = 1.25
    """A slot takes no new key once it has this many times the mean of requests under way."""
    check_ms: int = 250
    """How often every slot is asked whether it is ready; three times as often while it changes."""
    max_body: int = MAX_BODY
    """The largest body passed on, in bytes: what an instance reads."""
    socket: str | None = None
    """A local socket for an operator's commands (`set server …`), readable by this user alone."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^\s#\"'\\]*:\d{1,5}", self.bind):
            raise InvalidInput("bind", f"is {shown(self.bind)}; write it as 127.0.0.1:8200")
        if self.socket is not None and not re.fullmatch(r"/[^\s#\"'\\]+", self.socket):
            raise InvalidInput("socket", f"is {shown(self.socket)}; write an absolute path without spaces and quotes")
        if not 0.001 <= self.lease_s < 86_400:
            raise InvalidInput("lease_s", "must be from a millisecond to a day")
        if not 1 <= self.load_factor <= 100:
            raise InvalidInput("load_factor", "must be from 1 to 100")
        for name in ("check_ms", "max_body"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, "must be at least 1")


_BUFFER: Final = 256 * 1024
"""Bytes of a request that are kept to send it again elsewhere; a history of 8192 behaviours fits."""
_DEADLINE: Final = "req.hdr(x-relaygr-deadline-ms),mul(1)"
"""In whole milliseconds; hdr_val does not read decimals."""
_LARGEST_ID: Final = 2**31 - 1
_RESOLVERS: Final = """
resolvers names
    # Slots that are given by name are looked up again and again: one that is started anew may have another address.
    parse-resolv-conf
    hold valid 2s

"""


def haproxy(membership: Membership, config: HaproxyConfig | None = None) -> str:
    """The configuration, for all slots of the membership, whatever their health: HAProxy finds that out by itself.

    Raises InvalidInput for slots whose names or addresses cannot stand in one.
    """
    config = config or HaproxyConfig()
    factor = max(101, round(config.load_factor * 100))
    check = config.check_ms
    servers = "\n".join(_servers(membership))
    found = "last,libc,none"
    named = any(not _is_ip(urlsplit(member.address).hostname or "") for member in membership.members())
    if named:
        found += " resolvers names"
    return f"""\
# HAProxy in front of RelayGR's instances. Printed by `relaygr haproxy`: print it again when the slots change.

global
    fd-hard-limit 65536
    # A request up to this size can be sent again to another slot; larger ones are passed on and not sent again.
    tune.bufsize {_BUFFER}
{_socket(config)}
defaults
    mode http
    timeout connect 500ms
    timeout client 75s
    timeout server 75s
    timeout queue 1s
    timeout http-request 10s
    timeout http-keep-alive 75s
    # Pre-infer and rank may be sent twice: what is computed does not depend on it. So a slot that is gone, breaks off
    # or drains costs another try elsewhere and not the request.
    retries 3
    retry-on conn-failure empty-response junk-response 503
    option redispatch 1
    http-reuse always
{_refusals()}
{_RESOLVERS if named else ""}frontend relay
    bind {config.bind}
    # Before any of it is read.
    http-request deny deny_status 413 if {{ req.hdr_val(content-length) gt {config.max_body} }}
    http-request del-header upgrade  # instances speak HTTP/1.1 alone
    default_backend instances

backend instances
    # A key's slot, by a hash that moves only the keys of slots that come or go ...
    balance hdr(x-relaygr-key)
    hash-type consistent sdbm avalanche
    # ... unless that one has more than {factor / 100:g} times the mean of requests under way.
    hash-balance-factor {factor}
    # The rank follows its signal for as long as a lease lasts.
    stick-table type binary len 20 size 1m expire {round(config.lease_s * 1000)}ms
    stick on req.hdr(x-relaygr-key),sha1
    # The deadline that the sender says is when HAProxy stops waiting, too.
    http-request set-timeout server {_DEADLINE} if {{ {_DEADLINE} ge 1 }}
    # Ready, or draining and gone.
    option httpchk
    http-check send meth GET uri /readyz
    http-check expect status 200
    default-server check inter {check}ms fastinter {max(1, check // 3)}ms fall 2 rise 1 init-addr {found}
{servers}
"""


def _servers(membership: Membership) -> Iterator[str]:
    """A line for each slot. Its number comes from its name: keys belong to names, wherever they answer."""
    taken: set[int] = set()
    for member in membership.members():
        if not re.fullmatch(r"[A-Za-z0-9_.:-]+", member.slot):
            raise InvalidInput("slot", f"is {shown(member.slot)}; HAProxy takes letters, digits and _ . : -")
        parts = urlsplit(member.address)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise InvalidInput(
                f"gateway.instances.{member.slot}", f'is {shown(member.address)}; write it as "http://127.0.0.1:8100"'
            )
        number = zlib.crc32(member.slot.encode()) % _LARGEST_ID + 1
        while number in taken:
            number = number % _LARGEST_ID + 1
        taken.add(number)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        yield f"    server {member.slot} {host}:{parts.port} id {number}"
    if not taken:
        raise InvalidInput("gateway.instances", 'names none; write each as slot-0 = "http://127.0.0.1:8100"')


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _socket(config: HaproxyConfig) -> str:
    return f"    stats socket {config.socket} mode 600 level admin\n" if config.socket else ""


def _refusals() -> str:
    """What HAProxy answers itself, in the form that instances answer in."""
    lines = []
    for status, error, message in (
        (413, "TooLarge", "the body is larger than is read"),
        (502, "Unavailable", "an instance broke off"),
        (503, "Unavailable", "no instance takes new work"),
        (504, "DeadlineExceeded", "no instance answered in time"),
    ):
        body = json.dumps({"error": error, "message": message, "field": "body" if error == "TooLarge" else None})
        again = " hdr retry-after 1" if status == 503 else ""
        lines.append(f"    http-error status {status} content-type application/json string '{body}'{again}")
    return "\n".join(lines)
