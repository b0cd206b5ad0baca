"""A request gets one answer, of the first rows of each text, in whatever order its texts and windows are computed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.engine.request import EncoderRequest, Text
from hplm.engine.results import read_answers
from hplm.errors import Broken
from hplm.request.form import Form, TicketHead, write
from hplm.tenants.embedding import Embedding
from tests.engine.asker import texts_of

NOW = st.lists(st.one_of(st.just("fails"), st.integers(0, 2)), max_size=8)  # the texts that are done, one after the other
NONE = np.zeros(0, dtype=np.int64)


@pytest.fixture(scope="module")
def make(reference):
    view = reference.backbone.view

    def make(texts, respond=lambda request, answer: None):
        form = Form(write(b"", TicketHead("law", "acme", 0, 0, 1, 1), [0] * texts, [0] * texts, b"", b"", b""))
        return EncoderRequest(form, view, view.snapshot.find("acme"), respond)

    return make


@given(texts=st.integers(1, 3), events=NOW)
def test_it_is_answered_once_and_never_with_an_error_afterwards(make, texts, events):
    answers, done, expected = [], {}, []
    request = make(texts, lambda request, answer: answers.append(answer))
    for number, event in enumerate(events):
        if event == "fails":
            request.fail(error := Broken(str(number)))
            expected = expected or [error]
        elif event < texts:
            request.done([SimpleNamespace(index=event)], [rows := SimpleNamespace(number=number)])
            done.setdefault(event, rows)
            if len(done) == texts:
                expected = expected or [[done[text] for text in range(texts)]]
        assert answers == expected and request.answered == bool(expected)


@given(order=st.permutations(range(4)))
def test_the_windows_of_a_text_are_joined_in_their_order(make, order):
    request = make(2)
    spans = [np.full((1, 3), number, dtype=np.int32) for number in range(4)]
    texts = [Text(request, 1, NONE, NONE, spans[number], "passage", number, 4) for number in range(4)]
    joined = [request.joined(texts[number], np.full((1, 2), number, dtype=np.float32)) for number in order]
    assert joined[:-1] == [None] * 3
    logits, places = joined[-1]
    assert logits[:, 0].tolist() == places[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("letter", ["a", "水"])
def test_a_passage_counts_for_the_memory_limit(make, letter):
    """As it lies in the form, and as its answers quote it."""
    passage, spans = letter * 100_000, np.zeros((1, 3), dtype=np.int32)
    kept = len(passage.encode()) + sys.getsizeof(passage)
    windows = [Text(make(1), 0, NONE, NONE, spans, passage, number, 2) for number in range(2)]
    assert 0.7 * kept < sum(window.bytes for window in windows) < 1.5 * kept


def test_a_vector_has_the_length_1_also_beside_one_that_is_not_finite(reference):
    texts = texts_of(reference.backbone, "acme", ["a", "b"])
    tenant = replace(texts[0].request.tenant, task="embed", labels=(), head=None, embedding=Embedding(2))
    request = EncoderRequest(texts[0].request.form, reference.backbone.view, tenant, lambda request, answer: None)
    vectors = [np.float32([[3, 4, 9]]), np.float32([[np.nan, 4, 9]])]
    (_, (vector,)), (_, error) = read_answers(request.parts(), vectors)
    assert vector.logits.tolist() == [pytest.approx([0.6, 0.8])] and isinstance(error, Broken)
