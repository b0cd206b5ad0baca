"""The figures that the benchmark of policies and packings computes from a report and a journal."""

from collections import Counter

import numpy as np
import pytest

from bench.measuring.overload import Offered
from bench.measuring.policies import Texts, figures, ratios
from bench.policies import PoliciesBench
from hplm.errors import InvalidInput
from loadtest.report import Report
from testing.random_store import SIZES, tokenizer_json
from tests.support.message import mentioning


def test_utility_is_that_of_texts_started_in_time_and_on_time_is_what_the_client_saw():
    report = Report(
        wall_s=2.0,
        cpu_s=0.1,
        numbers=np.array([0, 2, 1]),
        statuses=np.array([200, 200, 503]),
        latencies=np.array([0.4, 0.6, 0.2]),
        lag_s=0.0,
        errors=Counter(timeout=1),
    )
    offered = Offered(np.array([0.0, 0.5, 1.0, 1.5]), np.array([0.5, 0.2, 0.5, 0.5]))
    entries = [
        {"request": "", "tokens": 4, "started": 10.1, "deadline": 10.5},  # answered in time
        {"request": "", "tokens": 2, "started": 11.4, "deadline": 11.5},  # started in time and answered late
        {"request": "", "tokens": 4, "started": 0, "deadline": 10.7},  # expired
        {"request": "", "tokens": 4, "started": 12.1, "deadline": 12.0},  # started too late
        {"request": "", "tokens": 4, "started": 5.0, "deadline": 0},  # of the closed loop
        {"batch": 1, "tokens": 6},
    ]
    found = figures(report, entries, offered, np.array([4, 4, 2, 4]))
    assert found == {"texts_per_s": 1.0, "on_time": 0.25, "utility": 0.6}
    around = [{"texts_per_s": 0.5, "on_time": on_time, "utility": 0.4} for on_time in (0.4, 0.6)]
    assert ratios(found, around) == {"texts_per_s": 2.0, "on_time": 0.5, "utility": 1.5}
    assert ratios(found, [found | {"on_time": 0.0}])["on_time"] is None


def test_texts_have_the_lengths_of_their_requests():
    from tokenizers import Tokenizer

    case = PoliciesBench()
    texts = Texts.draw(case)
    tokenizer = Tokenizer.from_str(tokenizer_json(SIZES[case.size].vocabulary))
    sample = range(0, len(texts.texts), 200)
    assert [len(tokenizer.encode(texts.texts[i]).ids) for i in sample] == texts.lengths[sample].tolist()
    assert texts.lengths_of(np.array([len(texts.texts) + 3])) == texts.lengths[3]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"policies": ("luck",)}, ["'luck'"]), ({"packings": ("dense",)}, ["'dense'"]), ({"overload": 0}, ["--overload 0"])],
)
def test_impossible_cases_are_refused(changed, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        PoliciesBench(**changed)
