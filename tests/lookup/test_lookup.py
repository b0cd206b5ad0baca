"""A request's form is the same whether its texts are read by words, by the library, together with others or alone."""

from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.lookup.lookup import MOST_CHARACTERS, MOST_ROWS, MOST_TOKENS, Lookup, LookupRequest
from hplm.request.form import Form
from testing.toy import WORDS
from tests.support.message import mentioning

LONG = " ".join(WORDS[i % 50] for i in range(100))  # the model takes 64 tokens
TEXTS = st.lists(st.sampled_from([*WORDS[:9], "", ",", "日本", "[MASK]", "q" * 40, "\x00", "  "]), max_size=9).map(" ".join)
REQUESTS = st.tuples(
    st.sampled_from(["acme", "beta", "city", "dune", "echo"]),  # of several tasks and chains
    st.lists(TEXTS | st.just(LONG), min_size=1, max_size=4),
    st.booleans(),  # with pairs
    st.booleans(),  # truncate
)


@pytest.fixture(scope="module")
def backbone(toy):
    return Backbone(toy.folder)


@pytest.fixture(scope="module")
def lookup(backbone):
    return Lookup(backbone)


@pytest.fixture(scope="module")
def by_library(backbone):
    lookup = Lookup(backbone)
    lookup._tokenizer._words = None
    return lookup


def reading_of(view, request):
    tenant, texts, with_pairs, truncate = request
    return LookupRequest(view, view.snapshot.find(tenant), texts, texts[::-1] if with_pairs else None, truncate)


def said(found):
    """Returns the comparable parts of forms and errors."""
    return bytes(found) if isinstance(found, bytearray) else (type(found), str(found))


@given(requests=st.lists(REQUESTS, min_size=1, max_size=5))
def test_requests_that_are_read_together_get_what_each_gets_alone_from_the_library(backbone, lookup, by_library, requests):
    view = backbone.view
    together = lookup.read([reading_of(view, request) for request in requests])
    alone = [by_library.read([reading_of(view, request)])[0] for request in requests]
    assert [said(found) for found in together] == [said(found) for found in alone]


@given(texts=st.lists(TEXTS, min_size=1, max_size=6), characters=st.integers(1, 60))
def test_pieces_give_what_the_whole_gives(backbone, lookup, texts, characters):
    view, texts = backbone.view, [text or WORDS[0] for text in texts]
    reading = LookupRequest(view, tenant := view.snapshot.find("beta"), texts)
    works, pieces = reading.divide(characters), 1
    while (found := lookup.read([reading])[0]) is None:
        pieces += 1
    assert said(found) == said(lookup.read([LookupRequest(view, tenant, texts)])[0])
    if isinstance(found, bytearray):
        assert pieces == len(works) <= len(texts) and (pieces == len(texts) or characters > 1)


def test_a_request_with_too_many_characters_is_refused(backbone):
    with pytest.raises(InvalidInput, match=mentioning("4,018,000", "4,000,000")):
        LookupRequest(backbone.view, backbone.view.snapshot.find("acme"), ["a " * 49_000] * 41)


@pytest.mark.parametrize(("tenant", "characters"), [("acme", 1000), ("acme", MOST_CHARACTERS), ("beta", 10_000)])
def test_the_texts_with_which_a_request_has_too_many_tokens_are_named(backbone, lookup, tenant, characters):
    few = MOST_TOKENS // 64  # texts of 64 tokens each
    reading = LookupRequest(backbone.view, backbone.view.snapshot.find(tenant), ["a " * 62] * (few + 3))
    reading.divide(characters)
    while (found := lookup.read([reading])[0]) is None:
        pass
    said = f"first {few + 1} of {few + 3} texts have {MOST_TOKENS + 64:,} tokens"
    assert isinstance(found, InvalidInput) and said in str(found)


class Breaking:
    """A tokenizer that one word breaks."""

    def __init__(self, whole):
        self._whole = whole

    def __getattr__(self, name):
        def read(given):
            if any(WORDS[1] in one for one in given):  # a text, or one with its pair
                raise RuntimeError("a bug")
            return getattr(self._whole, name)(given)

        return read


@pytest.mark.parametrize("tenant_id", ["acme", "beta"])  # by words, and by the library
def test_a_text_that_breaks_the_tokenizer_fails_only_its_own_request(backbone, tenant_id):
    own, view, tenant = copy(backbone), backbone.view, backbone.view.snapshot.find(tenant_id)
    own.tokenizer = lambda: Breaking(backbone.tokenizer())
    lookup = Lookup(own)
    good, bad, other = lookup.read([LookupRequest(view, tenant, [WORDS[number]]) for number in (0, 1, 3)])
    assert isinstance(bad, RuntimeError)
    for found, word in ((good, WORDS[0]), (other, WORDS[3])):
        np.testing.assert_array_equal(Form(found).addresses, lookup.resolve(view, tenant, [word]).addresses)


def test_requests_that_fail_behind_the_tokenizer_fail_alone(backbone, lookup):
    """One's table is broken, another's answer would have too many rows. Triton refuses one without a text before."""
    view, texts = backbone.view, ["a " * (MOST_ROWS // 32), *[WORDS[0]] * 32]
    broken = SimpleNamespace(snapshot=view.snapshot, forest=SimpleNamespace(chain=lambda *_: 1 / 0))
    asked = (view, "beta", texts[:-1]), (view, "beta", texts), (broken, "acme", [WORDS[0]]), (view, "acme", [])
    requests = [LookupRequest(own, view.snapshot.find(tenant), given, truncate=True) for own, tenant, given in asked]
    few, many, bad, nothing = lookup.read(requests)
    assert Form(few).counts == [MOST_ROWS // 32, *[1] * 31]
    assert isinstance(many, InvalidInput) and f"more than {MOST_ROWS:,} rows" in str(many)
    assert isinstance(bad, ZeroDivisionError) and isinstance(nothing, ValueError)


def test_an_answer_with_too_many_numbers_is_refused(backbone, lookup, monkeypatch):
    view = backbone.view
    monkeypatch.setattr("hplm.lookup.lookup.MOST_NUMBERS", 2 * len((tenant := view.snapshot.find("acme")).labels))
    two, three = lookup.read([LookupRequest(view, tenant, WORDS[:texts]) for texts in (2, 3)])
    assert Form(two).texts == 2 and isinstance(three, InvalidInput) and "numbers" in str(three)
