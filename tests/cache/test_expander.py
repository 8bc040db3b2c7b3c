"""The expander takes the least device time that is in time, else what is earliest."""

import math

from hypothesis import given
from hypothesis import strategies as st

from relaygr.cache import Option, Source, choose

few = st.sampled_from((0.0, 0.25, 0.5, 1.0, 2.0))  # few values: ties are common
options = st.builds(Option, st.sampled_from(Source), st.integers(0, 1000), few | st.floats(0, 10), few)
needed = st.one_of(few, st.just(math.inf), st.just(-1.0))


def better(one: Option, other: Option, needed: float) -> bool:
    """Whether the design prefers one to the other."""
    if (one.ready <= needed) != (other.ready <= needed):
        return one.ready <= needed
    if one.ready <= needed:
        return (one.device_s, one.ready) < (other.device_s, other.ready)
    return one.ready < other.ready


@given(st.lists(options, min_size=1, max_size=6), needed)
def test_nothing_is_better_than_the_chosen(given_options: list[Option], needed: float) -> None:
    chosen = choose(given_options, needed)
    assert any(option is chosen for option in given_options)
    assert not any(better(option, chosen, needed) for option in given_options)


@given(st.lists(options, min_size=1, max_size=6), needed)
def test_the_choice_does_not_depend_on_the_order_in_price_or_time(given_options: list[Option], needed: float) -> None:
    one, other = choose(given_options, needed), choose(given_options[::-1], needed)
    assert one.ready == other.ready
    assert one.device_s == other.device_s or one.ready > needed


@given(st.lists(options, min_size=1, max_size=6), needed, options)
def test_one_more_option_never_makes_it_worse(given_options: list[Option], needed: float, more: Option) -> None:
    assert not better(choose(given_options, needed), choose([*given_options, more], needed), needed)


def test_a_reload_is_taken_for_its_device_time_even_where_computing_is_sooner() -> None:
    compute = Option(Source.NOTHING, 0, ready=1.0, device_s=0.5)
    reload = Option(Source.HOST, 8192, ready=1.2, device_s=0.0)
    assert choose([compute, reload], needed=1.2) is reload
    assert choose([compute, reload], needed=1.1999) is compute
    assert choose([compute, reload], needed=0.5) is compute


def test_ready_exactly_when_needed_is_in_time() -> None:
    late, cheap = Option(Source.DEVICE, 1, 0.5, 0.2), Option(Source.HOST, 1, 1.0, 0.1)
    assert choose([late, cheap], needed=1.0) is cheap


def test_sources_are_their_own_labels() -> None:
    assert [source.value for source in Source] == [source.name for source in Source]
