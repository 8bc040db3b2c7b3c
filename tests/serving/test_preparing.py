"""What prepares a device says how far it is, and when it is done."""

import io
import threading

from rich.console import Console

from relaygr.serving.preparing import Preparing


def test_a_line_is_left_for_everything_that_was_done_and_none_for_what_was_not() -> None:
    out = io.StringIO()
    said = Preparing(Console(file=out, force_terminal=False, width=200))
    for done in range(1, 38):
        said("launches captured", done, 37)
        said("host pages pinned", done * 100, 6000)
    assert out.getvalue().startswith("relaygr engine: 37 launches captured in ")
    assert out.getvalue().count("\n") == 1
    said("host pages pinned", 6000, 6000)
    assert "relaygr engine: 6,000 host pages pinned in " in out.getvalue()


def test_a_terminal_is_shown_how_far_it_is() -> None:
    out = io.StringIO()
    said = Preparing(Console(file=out, force_terminal=True, width=200))
    said("launches captured", 1, 3)
    said._bar.refresh()
    assert "1/3" in out.getvalue()
    said("launches captured", 3, 3)
    assert "37" not in out.getvalue()
    assert out.getvalue().rstrip().splitlines()[-1].startswith("relaygr engine: 3 launches captured")


def test_threads_may_say_it_at_once() -> None:
    out = io.StringIO()
    said = Preparing(Console(file=out, force_terminal=False, width=200))
    names = [f"things {number}" for number in range(4)]

    def say(name: str) -> None:
        for done in range(1, 201):
            said(name, done, 200)

    threads = [threading.Thread(target=say, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line.split(" in ")[0] for line in out.getvalue().splitlines()) == [
        f"relaygr engine: 200 {name}" for name in names
    ]
