"""Candidates are unseen, distinct, in retrieval's order and within the budget; features are the documented ones."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr import History
from relaygr.cascade import (
    CANDIDATE_FEATURES,
    REQUEST_FEATURES,
    FeaturePreProcessing,
    Prepared,
    PreProcessingRequest,
    Retrieved,
)
from relaygr.errors import InvalidInput

ITEMS = st.lists(st.integers(0, 40) | st.integers(0, 2**63 - 1), max_size=60)
ALL = FeaturePreProcessing(request_features=len(REQUEST_FEATURES), candidate_features=len(CANDIDATE_FEATURES))


def prepare(
    retrieved: list[int],
    seen: list[int],
    *,
    stage: FeaturePreProcessing = ALL,
    candidates: int = 100,
    similarities: Any = None,
    at: float = 0.0,
    last: int = 0,
) -> Prepared:
    history = History(seen, [0] * len(seen), [last] * len(seen))
    known = None if similarities is None else np.asarray(similarities, np.float32)
    found = Retrieved(np.array(retrieved, np.int64), known)
    return asyncio.run(stage.run(PreProcessingRequest(history, found, candidates, at)))


@given(retrieved=ITEMS, seen=ITEMS, candidates=st.integers(1, 70), data=st.data())
def test_candidates_are_the_first_unseen_distinct_ones_with_their_own_features(
    retrieved: list[int], seen: list[int], candidates: int, data: st.DataObject
) -> None:
    numbers = st.lists(st.floats(-1, 1, width=32), min_size=len(retrieved), max_size=len(retrieved))
    similarities = data.draw(st.none() | numbers)
    unseen = [item for item in dict.fromkeys(retrieved) if item not in seen][:candidates]
    prepared = prepare(retrieved, seen, candidates=candidates, similarities=similarities)
    if not unseen:
        assert prepared.candidates is None
        return
    assert prepared.candidates is not None
    assert prepared.candidates.items.tolist() == unseen
    places = [retrieved.index(item) for item in unseen]
    wanted = [[0.0 if similarities is None else similarities[place], 1 / (1 + place)] for place in places]
    assert prepared.candidates.features is not None
    assert np.allclose(prepared.candidates.features, wanted)


@pytest.mark.parametrize("columns", range(len(CANDIDATE_FEATURES) + 1))
def test_a_candidate_has_as_many_features_as_the_model_reads(columns: int) -> None:
    stage = FeaturePreProcessing(candidate_features=columns)
    prepared = prepare([5, 6], [6], stage=stage, similarities=[0.5, 0.25])
    assert prepared.candidates is not None
    if columns == 0:
        assert prepared.candidates.features is None
    else:
        assert prepared.candidates.features is not None
        assert prepared.candidates.features.dtype == np.float32
        assert prepared.candidates.features.tolist() == [[0.5, 1.0][:columns]]


@pytest.mark.parametrize("columns", range(len(REQUEST_FEATURES) + 1))
def test_a_request_has_as_many_features_as_the_model_reads(columns: int) -> None:
    six_on_tuesday = 5 * 86_400 + 6 * 3600  # the sixth of January 1970
    stage = FeaturePreProcessing(request_features=columns)
    prepared = prepare([5], [1, 2], stage=stage, at=six_on_tuesday + 0.5, last=six_on_tuesday - 99)
    turn = 2 * math.pi * 30 / 168
    wanted = [1, 0, math.log(100.5), math.log(3), math.sin(turn), math.cos(turn)][:columns]
    if columns == 0:
        assert prepared.request is None
    else:
        assert prepared.request is not None
        assert prepared.request.dtype == np.float32
        assert np.allclose(prepared.request, wanted, atol=1e-4)


@given(seen=ITEMS, last=st.integers(-(2**63), 2**63 - 1), at=st.floats(-1e12, 1e12))
def test_request_features_are_finite_whenever_a_request_comes(seen: list[int], last: int, at: float) -> None:
    request = prepare([5], seen, last=last, at=at).request
    assert request is not None
    assert np.isfinite(request).all()
    if not seen or last >= at:
        assert request[2] == 0


@pytest.mark.parametrize("field", ["request_features", "candidate_features"])
@pytest.mark.parametrize("value", [-1, 7, "2"])
def test_a_model_that_reads_other_features_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        FeaturePreProcessing(**{field: value})
