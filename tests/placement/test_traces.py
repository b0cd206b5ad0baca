"""Journals and recorded traces as placement reads them, and loads that it draws."""

import json

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.placement.traces import MINUTES, read_trace, units_by_name
from hplm.placement.units import units_of
from hplm.placement.workload import Trace, refitted, synthetic
from hplm.simulate.arrivals import SECOND
from tests.placement.problems import profile
from tests.placement.profiles import backbone_profile, profile_of
from tests.support.message import mentioning, mentions

UNITS = {"x": "b0/law", "y": "b1/law"}
REQUEST = {"request": "r", "tenant": "x", "outcome": "ok", "texts": 1, "tokens": 5, "taken": 0, "deadline": 0}


def _written(tmp_path, *rows, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_recorded_trace_is_read_with_the_units_of_its_tenants(tmp_path):
    path = _written(
        tmp_path,
        {"arrival": 2.0, "tokens": 7, "tenant": "y", "deadline_ms": 30},
        {"arrival": 2.5, "tokens": 9, "unit": "b0/law"},
    )
    trace = read_trace([path], UNITS)
    assert trace.names == ("b0/law", "b1/law")
    assert trace.arrival_ns.tolist() == [0, SECOND // 2] and trace.unit.tolist() == [1, 0]
    assert trace.tokens.tolist() == [7, 9] and trace.timeout_ns.tolist() == [30_000_000, 0]


def test_a_journal_of_an_older_version_is_sorted_and_a_request_of_two_texts_counts_twice(tmp_path):
    path = _written(
        tmp_path,
        {**REQUEST, "arrived": 11.0, "texts": 2, "tokens": 20, "deadline": 11.25},
        {"batch": 1, "texts": 3, "tokens": 25, "stages": {}},
        {**REQUEST, "arrived": 10.0, "tenant": "y"},
    )
    trace = read_trace([path], UNITS)
    assert trace.arrival_ns.tolist() == [0, SECOND, SECOND] and trace.unit.tolist() == [1, 0, 0]
    assert trace.tokens.tolist() == [5, 10, 10] and trace.timeout_ns.tolist() == [0, SECOND // 4, SECOND // 4]


def test_journals_are_read_together_by_the_wall_clock_and_over_a_restart_of_the_machine(tmp_path):
    """The machine of the first one starts anew after its first request, that of the second one never."""
    b0, b1 = {**REQUEST, "backbone": "b0", "tenant": "a"}, {**REQUEST, "backbone": "b1", "tenant": "a"}
    here = _written(
        tmp_path,
        {"clock": 5000.0, "wall": 1e9, "backbone": "b0"},
        {**b0, "arrived": 5001.0, "answered": 5001.5},
        {"clock": 7.0, "wall": 1e9 + 100, "backbone": "b0"},
        {**b0, "arrived": 8.0, "answered": 8.5, "deadline": 8.25},
        {**b1, "arrived": 8.125, "answered": 8.75},
        name="here.jsonl",
    )
    there = _written(
        tmp_path,
        {"clock": 40.0, "wall": 1e9 + 40, "backbone": "b1"},
        {**b1, "arrived": 50.0, "answered": 50.5},
        {"batch": 3, "texts": 1, "tokens": 5, "stages": {}, "backbone": "b1"},
        name="there.jsonl",
    )
    own = profile(8.0, 8.0)
    trace = read_trace([here, there], units_by_name(own, units_of(own)))
    assert [trace.names[number] for number in trace.unit] == ["b0/law", "b1/law", "b0/law", "b1/law"]
    assert trace.arrival_ns.tolist() == [0, 49 * SECOND, 100 * SECOND, 100 * SECOND + SECOND // 8]
    assert trace.timeout_ns.tolist() == [0, 0, SECOND // 4, 0]
    alone = read_trace([here], units_by_name(own, units_of(own)))
    assert alone.arrival_ns.tolist() == [0, 100 * SECOND, 100 * SECOND + SECOND // 8]


HALF = '{"request": "r", "ten'
CLOCK = json.dumps({"clock": 1.0, "wall": 1e9})
ASKED = json.dumps({**REQUEST, "arrived": 2.0})


@pytest.mark.parametrize(
    "lines, requests, halves",
    [
        ([CLOCK, ASKED, HALF, CLOCK, ASKED], 2, 1),
        ([HALF, CLOCK, ASKED], 1, 1),
        ([CLOCK, ASKED, HALF, "", CLOCK, ASKED, HALF, CLOCK], 2, 3),
    ],
)
def test_what_a_killed_server_has_left_before_the_next_one_began_is_counted_and_left_out(tmp_path, lines, requests, halves):
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join([*lines, ""]))
    trace = read_trace([path], UNITS)
    assert len(trace) == requests and mentions(trace.source, f"{halves} half lines")
    with open(path, "a") as file:
        file.write(HALF)  # a server is writing it just now
    assert len(read_trace([path], UNITS)) == requests


@pytest.mark.parametrize(
    "lines, wrong",
    [
        ([CLOCK, HALF, ASKED, CLOCK], 2),
        ([CLOCK, ASKED, HALF, HALF], 3),
        ([CLOCK, ASKED, "[" * 10_000], 3),
        ([CLOCK, ASKED, HALF + CLOCK, ASKED], 3),
        ([HALF, json.dumps({"arrival": 1, "tokens": 2, "tenant": "x"})], 1),
    ],
)
def test_other_lines_that_are_no_objects_are_refused(tmp_path, lines, wrong):
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(InvalidInput, match=mentioning("journal.jsonl", f"line {wrong}", "JSON")):
        read_trace([path], UNITS)


CLOCKED = {"clock": 1.0, "wall": 1e9, "backbone": "b0"}


def _asked(at, name):
    backbone, tenant = name.split("/")
    return {**REQUEST, "arrived": at, "backbone": backbone, "tenant": tenant}


def test_requests_of_a_journal_that_have_no_unit_are_left_out(tmp_path):
    own = profile(8.0)
    asked = [(2.0, "b0/new"), (3.0, "b0/a"), (4.0, "b9/a"), (5.0, "b0/new"), (6.0, "b0/b")]
    path = _written(tmp_path, CLOCKED, *(_asked(at, name) for at, name in asked))
    trace = read_trace([path], units_by_name(own, units_of(own)))
    assert trace.arrival_ns.tolist() == [0, 3 * SECOND]
    assert trace.left_out.figures == {"requests": 3, "tenants": 2, "most": ["b0/new", "b9/a"]}
    assert len(trace.left_out.since(SECOND)) == 2 and len(trace.left_out.since(2 * SECOND)) == 1
    with pytest.raises(InvalidInput, match=mentioning("60.0%", "b0/new", "b9/a")):
        trace.expect_known()


def test_a_journal_of_two_boots_without_the_wall_clock_is_refused(tmp_path):
    times = [(5000.0, 5000.1), (4999.0, 5000.2), (7.0, 7.1)]
    rows = [{**REQUEST, "arrived": arrived, "answered": answered} for arrived, answered in times]
    with pytest.raises(InvalidInput, match=mentioning("line 3", "4,993", "clock")):
        read_trace([_written(tmp_path, *rows)], UNITS)
    assert len(read_trace([_written(tmp_path, *rows[:2])], UNITS)) == 2


@pytest.mark.parametrize("wall", ["then", None, float("nan"), 1e300])
def test_a_wall_clock_that_is_no_time_is_refused(tmp_path, wall):
    path = _written(tmp_path, {"clock": 5.0, "wall": wall}, {**REQUEST, "arrived": 6.0})
    with pytest.raises(InvalidInput, match=mentioning(path)):
        read_trace([path], UNITS)


def test_a_tenant_with_the_name_of_another_domain_is_found(tmp_path):
    own = profile_of(bert=backbone_profile(tenants={"root": ("law",), "law": ("a",)}))
    units = units_by_name(own, units_of(own))
    path = _written(
        tmp_path,
        {"clock": 1.0, "wall": 1e9, "backbone": "bert"},
        *({**REQUEST, "arrived": at, "backbone": "bert", "tenant": name} for at, name in ((1.0, "law"), (2.0, "a"))),
    )
    trace = read_trace([path], units)
    assert [trace.names[number] for number in trace.unit] == ["bert/root", "bert/law"]
    recorded = _written(tmp_path, {"arrival": 1, "tokens": 2, "unit": "bert/law"})
    assert read_trace([recorded], units).unit.tolist() == [trace.names.index("bert/law")]


def test_azures_functions_of_2019_are_counts_of_each_minute_striped_over_the_units(tmp_path):
    head = ["HashOwner", "HashApp", "HashFunction", "Trigger", *map(str, range(1, MINUTES + 1))]
    counts = [[0] * MINUTES for _ in range(3)]
    counts[0][0], counts[1][2], counts[2][1439] = 5, 7, 11
    rows = [["o", "a", f"f{i}", "http", *map(str, own)] for i, own in enumerate(counts)]
    path = tmp_path / "invocations.csv"
    path.write_text("\n".join(",".join(row) for row in [head, *rows]))
    trace = read_trace([path], UNITS, seed=3)
    assert trace.counts.tolist() == [16, 7]
    last = trace.arrival_ns[-11:] - trace.arrival_ns[-12]
    assert (np.diff(trace.arrival_ns) >= 0).all() and (last > 1436 * 60 * SECOND).all()
    assert (read_trace([path], UNITS, seed=3).arrival_ns == trace.arrival_ns).all()
    assert "2019" in trace.source


def test_azures_functions_of_2021_start_at_their_end_less_their_duration(tmp_path):
    path = tmp_path / "invocations.txt"
    path.write_text("app,func,end_timestamp,duration\na,f,10.5,0.5\na,g,10.75,1.0\na,f,12.0,1.0\n")
    trace = read_trace([path], UNITS)
    assert trace.arrival_ns.tolist() == [0, SECOND // 4, 5 * SECOND // 4] and trace.unit.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "rows, named",
    [
        ([], ("no requests",)),
        ([{"batch": 1, "texts": 3}], ("line 1",)),
        ([{"arrival": 2, "tokens": 4, "tenant": "x"}, {"arrival": 1, "tokens": 4, "tenant": "x"}], ("backwards", 2)),
        ([{"arrival": 2, "tokens": 4, "tenant": "z"}], ("'z'", "line 1")),
        ([{"arrival": 2, "tokens": 0, "tenant": "x"}], (0, "tokens")),
        ([{"arrival": 2, "tokens": 3_000_000_000, "tenant": "x"}], (3_000_000_000, 1 << 20)),
        ([{"arrival": 1e30, "tokens": 1, "tenant": "x"}], ("64 bits",)),
        ([[1]], ("line 1",)),
    ],
)
def test_a_bad_trace_is_refused(tmp_path, rows, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        read_trace([_written(tmp_path, *rows)], UNITS)


def test_a_trace_without_deadlines_names_the_way_out(tmp_path):
    trace = read_trace([_written(tmp_path, {"arrival": 2, "tokens": 4, "tenant": "x"})], UNITS)
    with pytest.raises(InvalidInput, match=mentioning("--slo-scale", 1)):
        trace.expect_deadlines()


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_a_synthetic_load_has_its_rate_and_burstiness(cv):
    trace = synthetic({"u": 50.0, "v": 25.0}, 400, cv, seed=2)
    gaps = np.diff(trace.arrival_ns[trace.unit == 0])
    assert trace.counts / 400 == pytest.approx([50, 25], rel=0.1 * max(1, cv))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15)
    assert "synthetic" in trace.source


def test_a_refit_scales_rate_and_burstiness_of_each_window():
    quiet, busy = synthetic({"u": 5.0}, 100, seed=1), synthetic({"u": 50.0}, 100, seed=2)
    arrival = np.concatenate([quiet.arrival_ns, busy.arrival_ns + 100 * SECOND])
    columns = (np.concatenate([getattr(quiet, name), getattr(busy, name)]) for name in ("unit", "tokens", "timeout_ns"))
    trace = Trace(("u",), arrival, *columns)
    twice = refitted(trace, 50, rate=2.0, cv=3.0, seed=1)
    middle = int(trace.arrival_ns[0]) + 100 * SECOND
    assert len(twice.between(0, middle)) == pytest.approx(1000, rel=0.35)
    assert len(twice.between(middle, middle + 100 * SECOND)) == pytest.approx(10_000, rel=0.25)
    gaps = np.diff(twice.between(middle, middle + 100 * SECOND).arrival_ns)
    assert gaps.std() / gaps.mean() > 2
    assert "rate x 2" in twice.source
    assert (refitted(trace, 50, seed=1).arrival_ns == refitted(trace, 50, seed=1).arrival_ns).all()


def test_parts_of_a_trace():
    at = np.array([0, 1, 2, 50, 51, 52, 53, 90]) * SECOND
    zeros = np.zeros(8, np.int64)
    trace = Trace(("u",), at, zeros, zeros + 1, zeros)
    assert trace.busiest(10).arrival_ns.tolist() == at[3:7].tolist()
    assert [len(window) for window in trace.windows(30)] == [3, 4, 1]
    assert len(trace.sampled(100)) == 8 and len(trace.sampled(3)) == 3
    for seconds in (1e-10, 0.0, np.inf, np.nan):
        with pytest.raises(InvalidInput, match="seconds"):
            trace.windows(seconds)
        with pytest.raises(InvalidInput, match="seconds"):
            trace.busiest(seconds)
    sampled = synthetic({"u": 100.0}, 100, 3.0).sampled(1600)
    assert 1500 <= len(sampled) <= 1600 and sampled.seconds > 80
