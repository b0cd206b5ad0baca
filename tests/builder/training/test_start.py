"""A new version of a tenant begins with the form of the version before."""

import pytest

from builder.store.version import TenantVersion
from builder.training.start import chosen_embedding
from hplm.errors import InvalidInput
from hplm.tenants.embedding import Embedding
from testing.toy import CONFIG
from tests.support.message import mentioning

BEFORE = TenantVersion(
    "finder", 1, "root", 1, "embed", [], 4, embedding=Embedding(16, "first", prefixes={"query": "q ", "passage": "p "})
)


def test_fields_of_vectors_that_are_not_given_stay_also_of_two_prefixes_one():
    assert chosen_embedding("embed", BEFORE, CONFIG, {}) == BEFORE.embedding
    found = chosen_embedding("embed", BEFORE, CONFIG, {"prefixes": {"query": "search "}, "normalised": False})
    assert found == Embedding(16, "first", False, prefixes={"query": "search ", "passage": "p "})
    assert chosen_embedding("embed", None, CONFIG, {}) == Embedding(CONFIG.hidden)


@pytest.mark.parametrize(
    ("task", "given", "named"),
    [
        ("classify", {"prefixes": {"query": "q "}}, ["--query-prefix or --passage-prefix", "classify"]),
        ("classify", {"shortens": True}, ["--shortens", "classify"]),
        ("embed", {"dimensions": 8}, ["--dimensions 8", "16", "--id"]),
        ("embed", {"dimensions": CONFIG.hidden + 1}, [f"1 to {CONFIG.hidden}"]),
    ],
)
def test_fields_of_vectors_that_do_not_apply_are_refused_by_their_options(task, given, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        chosen_embedding(task, BEFORE, CONFIG, given)
