"""Counting, publishing, the choice of tenants with series of their own, and requests by what their clients got."""

import threading
import weakref

import pytest

from hplm.metrics import names
from hplm.metrics.meter import OTHERS, Meter, Outcomes, outcome_of
from hplm.metrics.names import COUNTER, GAUGE, Histogram, Metric
from hplm.metrics.publisher import Publisher
from tests.support.wait import eventually

SEEN, LEVEL = Metric("seen_total", COUNTER, "what was seen", ("kind",)), Metric("level", GAUGE, "how high")
SLACK = Histogram("slack", "what is left", signed=True, bounds=(0.1, 1.0))


class Family:
    """A fake of Triton's MetricFamily. Triton shows a series as long as its object lives."""

    COUNTER, GAUGE = "c", "g"
    all: dict

    def __init__(self, name, description, kind):
        assert name not in self.all, "a family is made once"
        self.kind, self.series = kind, weakref.WeakValueDictionary()
        self.all[name] = self

    def Metric(self, labels):
        self.series[tuple(labels.values())] = made = Series(self, labels)
        return made


class Series:
    def __init__(self, family, labels):
        self.family, self.value, self.labels = family, 0, labels

    def increment(self, value):
        if self.labels.get("kind") == "refused" or (value < 0 and self.family.kind == "c"):
            raise RuntimeError("this series is refused")  # as Triton does when a counter is decremented
        self.value += value

    def set(self, value):
        assert self.family.kind == "g"
        self.value = value


@pytest.fixture
def family():
    return type("Fresh", (Family,), {"all": {}})


def shown(family):
    """Returns the values that Triton shows, by the name of the metric and its labels."""
    return {(name, *labels): one.value for name, made in family.all.items() for labels, one in made.series.items()}


def test_sums_of_signed_times_are_shown_and_those_of_engines_that_follow_each_other_add_up(family):
    """A counter cannot fall. An engine that is started again begins with nothing."""
    published = Meter()
    publisher = Publisher(family, published, "toy")
    for _ in range(2):
        engine = Meter()
        for value in (-2.0, 0.5):
            engine.observe(SLACK, [value])
            counts, gauges = engine.take()
            published.add_all(counts)
            published.set_all(gauges)
    publisher.close()
    del publisher  # Triton shows the last values: its process can free no metric any more
    found = shown(family)
    assert (found["slack_sum", "toy"], found["slack_count", "toy"]) == (-3.0, 4)
    assert [found["slack_bucket", "toy", bound] for bound in ("0.1", "1", "+Inf")] == [2, 4, 4]


def test_a_series_that_fails_loses_nothing_and_keeps_the_others(family, caplog):
    meter = Meter()
    meter.add(SEEN, 2, "refused")
    meter.add(SEEN, 1, "taken")
    meter.set(LEVEL, 7)
    publisher = Publisher(family, meter, "toy")
    publisher.close()
    assert shown(family) == {("seen_total", "toy", "taken"): 1, ("seen_total", "toy", "refused"): 0, ("level", "toy"): 7}
    assert "seen_total" in caplog.text and "refused" in caplog.text
    meter.add(SEEN, 3, "refused")
    assert meter.take()[0] == {(SEEN, ("refused",)): 5}, "the refused count is still there"


def test_after_a_failure_the_last_counts_are_published_and_unused_series_end(family):
    failed, meter, who = threading.Event(), Meter(), Metric("shown", GAUGE, "who is shown", ("who",))

    def before():
        if not failed.is_set():
            failed.set()
            raise OSError("the server is busy")

    meter.set_all({(who, ("a",)): 1})
    meter.look, meter.keeps = before, lambda series: series[1] != ("gone",)
    publisher = Publisher(family, meter, "toy", seconds=0.01)
    eventually(lambda: ("shown", "toy", "a") in shown(family))
    assert failed.is_set()
    meter.add(SEEN, 3, "a")
    meter.add(SEEN, 1, "gone")
    meter.set(LEVEL, 2)
    meter.set_all({(who, ("b",)): 2})
    publisher.close()
    assert shown(family) == {("seen_total", "toy", "a"): 3, ("level", "toy"): 2, ("shown", "toy", "b"): 2}


@pytest.fixture
def outcomes():
    return Outcomes()


def counted(outcomes, ended, deadlines):
    outcomes.count([("law", tenant, outcome) for tenant, outcome in ended], [0.15] * len(ended), deadlines)
    return outcomes.take()[0]


def test_deadlines_of_answered_and_refused_requests_are_counted(outcomes):
    ended = [("acme", outcome) for outcome in ("on_time", "deadline", "draining", "answered")]
    counts = counted(outcomes, ended, [0.05, 0.15, 0.15])
    bucket, total, number = names.DEADLINE_SECONDS.parts
    assert counts[number, ()] == 3 and counts[total, ()] == pytest.approx(0.35)
    assert [counts[bucket, (bound,)] for bound in ("0.02", "0.05", "0.1", "0.2", "+Inf")] == [0, 1, 1, 3, 3]
    assert counts[names.REQUESTS, ("law", "on_time")] == counts[names.TENANT_REQUESTS, ("acme", "answered")] == 1
    assert [outcome_of(deadline_ns, 5) for deadline_ns in (0, 5, 4)] == ["answered", "on_time", "late"]


def test_times_from_arrival_to_answer_are_counted_by_outcome(outcomes):
    outcomes.count([("law", "acme", outcome) for outcome in ("late", "late", "draining")], [0.15, 45.0, 0.001], [])
    counts, (bucket, total, number) = outcomes.take()[0], names.ANSWER_SECONDS.parts
    assert [counts[bucket, ("late", bound)] for bound in ("0.1", "0.2", "10", "30", "60", "+Inf")] == [0, 1, 1, 1, 2, 2]
    assert counts[number, ("late",)] == 2 and counts[total, ("late",)] == pytest.approx(45.15)
    assert counts[bucket, ("draining", "0.001")] == counts[number, ("draining",)] == 1


def test_only_the_busiest_tenants_have_series_and_a_free_one_is_given_at_once():
    outcomes = Outcomes(most=2)

    def shown_as(tenants):
        """Returns how many requests of these tenants each series counts."""
        counts = counted(outcomes, [(tenant, "answered") for tenant in tenants], [])
        assert counts[names.REQUESTS, ("law", "answered")] == len(tenants)
        return {labels[0]: count for (metric, labels), count in counts.items() if metric == names.TENANT_REQUESTS}

    assert shown_as("a") == {"a": 1}
    outcomes.choose()
    assert shown_as("abbbcccc") == {"a": 1, "b": 3, OTHERS: 4}
    of_tenants = [
        (names.TENANT_REQUESTS, ("b", "answered")),
        (names.EXIT_AGREEMENT, ("c", "1")),
        (names.EXIT_AGREEMENT, ("", "1")),
    ]
    assert [outcomes.keeps(one) for one in of_tenants] == [True, False, True]
    assert outcomes.keeps((names.REQUESTS, ("law", "answered")))
    outcomes.choose()
    assert shown_as("abc") == {OTHERS: 1, "b": 1, "c": 1}
