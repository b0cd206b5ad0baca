"""Texts of a tenant with a link: an engine gives back those that another backbone should read, with their answers."""

import json
import random

import pytest

from hplm.levels.plan import Plan, Step
from hplm.tenants.link import Link
from hplm.tenants.ticket import ARRIVES, LEAVES
from testing.reference import Reference
from testing.toy import random_text
from tests.climb import Climb
from tests.engine.asker import Asker
from tests.links import FAR, make_linked

pytestmark = pytest.mark.slow

PLAN = Plan((Step(0, 0.6, 1.0, 0.9), Step(1, 0.7, 1.0, weight=0.6), Step(2, weight=0.7)))


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    return make_linked(tmp_path_factory.mktemp("linked"), {"pair": Link(FAR, "pair", 1, PLAN)})


def test_unsure_texts_are_given_back_if_the_request_follows_the_link(linked, tmp_path):
    folder, file = linked.model(linked.near), tmp_path / "journal.jsonl"
    asker, rng = Asker(folder, journal=str(file)), random.Random(3)
    texts = [random_text(rng, 20) for _ in range(24)]
    ways = {"across": LEAVES}, {}, {"across": ARRIVES}, {"across": LEAVES, "rung": 1}
    asked = [asker.ask("pair", texts, **how) for how in ways]
    answers = [asker.wait(number) for number in asked]
    asker.close()
    assert all(answer.level == 2 and not answer.onward for some in answers[1:] for answer in some)
    reference, shortened, levels = Reference.open(folder), 0, set()
    for text, answer in zip(texts, answers[0], strict=True):
        climb = Climb(reference, "pair", text, None, PLAN, Reading(asker.lookup))
        if climb.is_close:
            continue
        levels.add((answer.level, climb.goes_across))
        assert (answer.level, bool(answer.onward)) == (climb.level, climb.goes_across)
        if answer.onward:
            left = " ".join(text[start:stop] for start, stop in json.loads(answer.onward)) or text
            words = text.split()
            assert left == " ".join(words[number] for number in sorted(climb.words_left or range(len(words))))
            shortened += left != text
    assert shortened and {(1, False), (2, False), (2, True)} >= levels and (2, True) in levels
    rungs = {entry["request"]: entry["rung"] for entry in map(json.loads, file.read_text().splitlines()) if "request" in entry}
    assert [rungs[f"request {number}"] for number in asked] == [0, 1, 1, 1]


class Reading:
    """Looks texts up as for requests that follow the link."""

    def __init__(self, lookup):
        self._lookup = lookup

    def resolve(self, view, tenant, texts, pairs):
        return self._lookup.resolve(view, tenant, texts, pairs, link=tenant.link)
