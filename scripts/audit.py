"""Ask the OSV database which pinned versions have known vulnerabilities: `python scripts/audit.py constraints.txt`.

Ends with status 1 where it knows of any. Where it cannot be asked, that is said, and the status is 0: a machine without
a network can build all the same, but nobody is told that all is well. A vulnerability that does not matter here is
named in the file, with why: `# accepted: GHSA-… because …`.
"""

import argparse
import http.client
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SERVICE = "https://api.osv.dev/v1/querybatch"
TIMEOUT_S = 10.0


def pins(text: str) -> list[tuple[str, str]]:
    """Names and versions of a constraints file."""
    return re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", text, re.M)


def accepted(text: str) -> set[str]:
    return set(re.findall(r"^# accepted: (\S+)", text, re.M))


def known(found: list[tuple[str, str]], service: str = SERVICE) -> dict[tuple[str, str], list[str]]:
    """The vulnerabilities of each that has any. Raises OSError where the service does not answer as it should."""
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in found]
    request = urllib.request.Request(
        service, json.dumps({"queries": queries}).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            results: list[dict[str, Any]] = json.load(reply)["results"]
        told = {pin: [one["id"] for one in result.get("vulns", ())] for pin, result in zip(found, results, strict=True)}
    except (ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise OSError(f"its answer cannot be read: {error}") from error
    return {pin: sorted(names) for pin, names in told.items() if names}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--service", default=SERVICE, help="another of the same kind")
    given = parser.parse_args(arguments)
    text = given.file.read_text()
    found, allowed = pins(text), accepted(text)
    try:
        told = known(found, given.service)
    except OSError as error:
        print(f"NOT AUDITED: {given.service} could not be asked ({getattr(error, 'reason', None) or error})")
        return 0
    bad = {pin: [name for name in names if name not in allowed] for pin, names in told.items()}
    bad = {pin: names for pin, names in bad.items() if names}
    for (name, version), names in bad.items():
        print(f"{name} {version}: {', '.join(names)}")
    print(f"{len(found)} versions audited, {len(bad)} with known vulnerabilities")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
