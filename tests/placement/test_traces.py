"""Journals and recorded traces as placement reads them, and loads that it draws."""

import json

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.placement.traces import read_trace, units_by_name
from hplm.placement.units import units_of
from hplm.placement.workload import Trace
from hplm.simulate.arrivals import SECOND
from testing.random_trace import random_trace
from tests.placement.problems import backbone_profile, profile, profile_of
from tests.support.message import mentions, refusing

UNITS = {"x": "b0/law", "y": "b1/law"}
REQUEST = {"request": "r", "tenant": "x", "outcome": "ok", "texts": 1, "tokens": 5, "taken": 0, "deadline": 0}


HALF = '{"request": "r", "ten'
CLOCK = {"clock": 1.0, "wall": 1e9}
ASKED = {**REQUEST, "arrived": 2.0}
EARLY = {"arrival": 1, "tokens": 2, "tenant": "x"}
TIMES = (5000.0, 5000.1), (4999.0, 5000.2), (7.0, 7.1)  # the third is of another boot
TWO_BOOTS = [{**REQUEST, "arrived": arrived, "answered": answered} for arrived, answered in TIMES]


def _written(tmp_path, *lines, name="trace.jsonl"):
    """Writes lines: texts as they are, and objects as JSON."""
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "name, lines, arrival_s, unit, tokens, timeout_s",
    [
        ("a recorded trace.jsonl", [
            {"arrival": 2.0, "tokens": 7, "tenant": "y", "deadline_ms": 30}, {"arrival": 2.5, "tokens": 9, "unit": "b0/law"},
        ], [0, 0.5], [1, 0], [7, 9], [0.03, 0]),
        ("a journal of an older version with a request of two texts.jsonl", [
            {**REQUEST, "arrived": 11.0, "texts": 2, "tokens": 20, "deadline": 11.25},
            {"batch": 1, "texts": 3, "tokens": 25, "stages": {}}, {**REQUEST, "arrived": 10.0, "tenant": "y"},
        ], [0, 1, 1], [1, 0, 0], [5, 10, 10], [0, 0.25, 0.25]),
    ],
)  # fmt: skip
def test_a_file_is_read_with_the_units_of_its_tenants(tmp_path, name, lines, arrival_s, unit, tokens, timeout_s):
    trace = read_trace([_written(tmp_path, *lines, name=name)], UNITS)
    assert trace.names == ("b0/law", "b1/law")
    assert (trace.arrival_ns / SECOND).tolist() == arrival_s and trace.unit.tolist() == unit
    assert trace.tokens.tolist() == tokens and (trace.timeout_ns / SECOND).tolist() == timeout_s


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


@pytest.mark.parametrize(
    "lines, requests, halves",
    [
        ([CLOCK, ASKED, HALF, CLOCK, ASKED], 2, 1),
        ([HALF, CLOCK, ASKED], 1, 1),
        ([CLOCK, ASKED, HALF, "", CLOCK, ASKED, HALF, CLOCK], 2, 3),
    ],
)
def test_what_a_killed_server_has_left_before_the_next_one_began_is_counted_and_left_out(tmp_path, lines, requests, halves):
    path = _written(tmp_path, *lines)
    trace = read_trace([path], UNITS)
    assert len(trace) == requests and mentions(trace.source, f"{halves} half lines")
    with open(path, "a") as file:
        file.write(HALF)  # a server is writing it just now
    assert len(read_trace([path], UNITS)) == requests


def _asked(at, name):
    backbone, tenant = name.split("/")
    return {**REQUEST, "arrived": at, "backbone": backbone, "tenant": tenant}


def test_requests_of_a_journal_that_have_no_unit_are_left_out(tmp_path):
    own = profile(8.0)
    asked = [(2.0, "b0/new"), (3.0, "b0/a"), (4.0, "b9/a"), (5.0, "b0/new"), (6.0, "b0/b")]
    path = _written(tmp_path, {**CLOCK, "backbone": "b0"}, *(_asked(at, name) for at, name in asked))
    trace = read_trace([path], units_by_name(own, units_of(own)))
    assert trace.arrival_ns.tolist() == [0, 3 * SECOND]
    assert trace.left_out.figures == {"requests": 3, "tenants": 2, "most": ["b0/new", "b9/a"]}
    assert len(trace.left_out.since(SECOND)) == 2 and len(trace.left_out.since(2 * SECOND)) == 1
    with refusing(InvalidInput, "60.0%", "b0/new", "b9/a"):
        trace.expect_known()


def test_a_tenant_with_the_name_of_another_domain_is_found(tmp_path):
    own = profile_of(bert=backbone_profile(tenants={"root": ("law",), "law": ("a",)}))
    units = units_by_name(own, units_of(own))
    rows = {**CLOCK, "backbone": "bert"}, _asked(1.0, "bert/law"), _asked(2.0, "bert/a")
    trace = read_trace([_written(tmp_path, *rows)], units)
    assert [trace.names[number] for number in trace.unit] == ["bert/root", "bert/law"]
    recorded = _written(tmp_path, {"arrival": 1, "tokens": 2, "unit": "bert/law"})
    assert read_trace([recorded], units).unit.tolist() == [trace.names.index("bert/law")]


@pytest.mark.parametrize(
    "lines, named",
    [
        ([CLOCK, HALF, ASKED, CLOCK], ("line 2", "JSON")),
        ([CLOCK, ASKED, HALF, HALF], ("line 3", "JSON")),
        ([CLOCK, ASKED, "[" * 10_000], ("line 3", "JSON")),
        ([CLOCK, ASKED, HALF + json.dumps(CLOCK), ASKED], ("line 3", "JSON")),
        ([HALF, EARLY], ("line 1", "JSON")),
        (TWO_BOOTS, ("line 3", "4,993", "clock")),
        ([[1]], ("line 1",)),
        *(([{**CLOCK, "wall": wall}, ASKED], ()) for wall in ("then", None, float("nan"), 1e300)),
        ([], ("no requests",)),
        ([{"batch": 1, "texts": 3}], ("line 1",)),
        ([{**EARLY, "arrival": 2}, EARLY], ("backwards", 2)),
        ([{**EARLY, "tenant": "z"}], ("'z'", "line 1")),
        ([{**EARLY, "tokens": 0}], (0, "tokens")),
        ([{**EARLY, "tokens": 3_000_000_000}], (3_000_000_000, 1 << 20)),
        ([{**EARLY, "arrival": 1e30}], ("64 bits",)),
    ],
)
def test_a_bad_trace_is_refused_by_its_file_and_line(tmp_path, lines, named):
    path = _written(tmp_path, *lines)
    with refusing(InvalidInput, path.name, *named):
        read_trace([path], UNITS)


def test_parts_of_a_trace():
    at = np.array([0, 1, 2, 50, 51, 52, 53, 90]) * SECOND
    zeros = np.zeros(8, np.int64)
    trace = Trace(("u",), at, zeros, zeros + 1, zeros)
    assert trace.busiest(10).arrival_ns.tolist() == at[3:7].tolist()
    assert len(trace.sampled(100)) == 8 and len(trace.sampled(3)) == 3
    for seconds in (1e-10, 0.0, np.inf, np.nan):
        with refusing(InvalidInput, "seconds"):
            trace.busiest(seconds)
    twice = trace.at_rate(2.0)
    assert (twice.arrival_ns * 2 == at).all() and twice.seconds < trace.seconds and "x 2" in twice.source
    sampled = random_trace({"u": 100.0}, 100, 3.0).sampled(1600)
    assert 1500 <= len(sampled) <= 1600 and sampled.seconds > 80
