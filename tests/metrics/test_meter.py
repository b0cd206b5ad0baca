"""Counting, publishing, and the choice of tenants with series of their own."""

import threading

import pytest

from hplm.metrics.busiest import OTHERS, Busiest
from hplm.metrics.meter import Meter
from hplm.metrics.names import COUNTER, GAUGE, Histogram, Metric
from hplm.metrics.publisher import Publisher
from tests.support.wait import eventually

SEEN, LEVEL = Metric("seen_total", COUNTER, "what was seen", ("kind",)), Metric("level", GAUGE, "how high")


class Family:
    """Stands in for Triton's MetricFamily."""

    COUNTER, GAUGE = "c", "g"
    all: dict

    def __init__(self, name, description, kind):
        assert name not in self.all, "a family is made once"
        self.name, self.kind, self.series = name, kind, {}
        self.all[name] = self

    def Metric(self, labels):
        return Series(self, labels)


class Series:
    def __init__(self, family, labels):
        self.family, self.value, self.labels = family, 0, labels
        family.series[tuple(labels.items())] = self

    def increment(self, value):
        if value < 0 and self.family.kind == "c":
            raise RuntimeError("a counter was decremented")  # as Triton does
        self.value += value

    def set(self, value):
        assert self.family.kind == "g"
        self.value = value


@pytest.fixture
def family():
    return type("Fresh", (Family,), {"all": {}})


def test_counts_are_taken_once_and_levels_stay():
    meter = Meter()
    threads = [threading.Thread(target=lambda: [meter.add(SEEN, 1, "a") for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meter.add(SEEN, 2.5, "b")
    meter.set(LEVEL, 7)
    assert meter.take() == ({(SEEN, ("a",)): 4000, (SEEN, ("b",)): 2.5}, {(LEVEL, ()): 7})
    assert meter.take() == ({}, {(LEVEL, ()): 7})


def test_a_histogram_counts_each_value_in_every_bucket_above_it():
    meter, times = Meter(), Histogram("times", "how long", (0.1, 1.0))
    meter.observe(times, [0.1, 0.05, 0.5, 3.0])
    meter.observe(times, [])
    bucket, total, count = times.parts
    counts, _ = meter.take()
    assert {labels[0]: value for (metric, labels), value in counts.items() if metric == bucket} == {"0.1": 2, "1": 3, "+Inf": 4}
    assert counts[total, ()] == pytest.approx(3.65)
    assert counts[count, ()] == 4


def test_the_sum_of_signed_times_is_a_gauge(family):
    meter, slack = Meter(), Histogram("slack", "what is left", signed=True, bounds=(0.1, 1.0))
    publisher = Publisher(family, meter, "toy")
    meter.observe(slack, [0.05, -2.0])
    meter.observe(slack, [-1.0])
    meter.add(SEEN, 1, "after")
    publisher.close()
    values = {name: [series.value for series in made.series.values()] for name, made in family.all.items()}
    assert values["slack_sum"] == [pytest.approx(-2.95)]
    assert values["slack_count"] == [3]
    assert values["slack_bucket"] == [3, 3, 3], "what is below 0 is below every bound"
    assert values["seen_total"] == [1]


def test_sums_of_processes_that_follow_each_other_add_up_as_their_counts_do(family):
    """An engine that is started again begins with nothing."""
    slack, published = Histogram("slack", "what is left", signed=True, bounds=(0.1, 1.0)), Meter()
    publisher = Publisher(family, published, "toy")
    for _ in range(2):
        engine = Meter()
        for value in (-2.0, 0.5):
            engine.observe(slack, [value])
            counts, levels = engine.take()
            published.add_all(counts)
            published.set_all(levels)
    publisher.close()
    (total,), (count,) = (family.all[f"slack_{part}"].series.values() for part in ("sum", "count"))
    assert (total.value, count.value) == (-3.0, 4)


def test_a_series_that_fails_loses_nothing_and_keeps_the_others(family, caplog, monkeypatch):
    def increment(self, value):
        if self.labels["kind"] == "refused":
            raise RuntimeError("this series is refused")
        self.value += value

    monkeypatch.setattr(Series, "increment", increment)
    meter = Meter()
    meter.add(SEEN, 2, "refused")
    meter.add(SEEN, 1, "taken")
    meter.set(LEVEL, 7)
    Publisher(family, meter, "toy").close()
    values = {labels: series.value for made in family.all.values() for labels, series in made.series.items()}
    assert values[("backbone", "toy"), ("kind", "taken")] == 1
    assert values[(("backbone", "toy"),)] == 7
    assert "seen_total" in caplog.text and "refused" in caplog.text
    meter.add(SEEN, 3, "refused")
    assert meter.take()[0] == {(SEEN, ("refused",)): 5}, "the refused count is still there"


def test_closing_publishes_the_last_counts_and_unused_series_end(family):
    meter, looked = Meter(), []
    publisher = Publisher(family, meter, "toy", before=lambda: looked.append(1), keeps=lambda series: series[1] != ("gone",))
    meter.add(SEEN, 3, "a")
    meter.add(SEEN, 1, "gone")
    meter.set(LEVEL, 2)
    publisher.close()
    assert looked
    assert family.all["seen_total"].series[("backbone", "toy"), ("kind", "a")].value == 3
    assert family.all["level"].series[(("backbone", "toy"),)].value == 2
    assert set(publisher._metrics) == {(SEEN, ("a",)), (LEVEL, ())}


def test_the_publisher_continues_after_a_failure(family, monkeypatch):
    meter, failed = Meter(), threading.Event()

    def before():
        if not failed.is_set():
            failed.set()
            raise OSError("the server is busy")

    monkeypatch.setattr("hplm.metrics.publisher.SECONDS", 0.01)
    publisher = Publisher(family, meter, "toy", before)
    assert failed.wait(10)
    meter.set(LEVEL, 1)
    publisher.close()
    assert family.all["level"].series[(("backbone", "toy"),)].value == 1


def test_the_busiest_tenants_are_shown_by_name():
    busiest = Busiest(2)
    assert [busiest.name(tenant) for tenant in "aabbbcccc"] == ["a", "a", "b", "b", "b"] + [OTHERS] * 4
    assert busiest.chosen == {"a", "b"}
    busiest.choose()
    assert busiest.chosen == {"b", "c"}
    assert [busiest.name(tenant) for tenant in "abc"] == [OTHERS, "b", "c"]
    for _ in range(5):
        busiest.choose()
    assert not busiest._asked, "who does not ask is forgotten"
    busiest = Busiest(3)
    busiest.name("a")
    busiest.choose()
    assert busiest.name("b") == "b" and "b" in busiest.chosen, "shown at once if a name is free"


def test_of_a_metric_with_one_series_the_ones_before_end(family, monkeypatch):
    shown = Metric("shown", GAUGE, "who is shown", ("who",))
    monkeypatch.setattr("hplm.metrics.publisher.SECONDS", 0.01)
    meter = Meter()
    meter.set(LEVEL, 7)
    meter.set_only(shown, 1, "a")
    publisher = Publisher(family, meter, "toy")
    eventually(lambda: (shown, ("a",)) in publisher._metrics)
    meter.set_only(shown, 2, "b")
    publisher.close()
    assert meter.take()[1] == {(LEVEL, ()): 7, (shown, ("b",)): 2}
    assert set(publisher._metrics) == {(LEVEL, ()), (shown, ("b",))}, "Triton shows a series as long as its object lives"
