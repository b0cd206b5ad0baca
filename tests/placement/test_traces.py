"""Journals and recorded traces as placement reads them, and loads that it draws."""

import json
from pathlib import Path

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.placement.traces import read_trace
from hplm.placement.units import units_by_name, units_of
from hplm.placement.workload import Trace
from hplm.simulate.arrivals import SECOND
from testing.random_trace import random_trace
from tests.placement.problems import backbone_profile, profile, profile_of
from tests.support.message import mentions, refusing

UNITS = {"x": "b0/law", "y": "b1/law", "b0/x": "b0/law", "b1/y": "b1/law"}
EARLY = {"arrival": 1, "tokens": 2, "tenant": "x"}
HALF = '{"request": "r", "ten'


def _asked(at, name="b0/x", **changed):
    """Returns the line of a request in a journal, of a machine that was started a billion seconds after the epoch."""
    backbone, tenant = name.split("/")
    own = {"backbone": backbone, "tenant": tenant, "texts": 1, "tokens": 5, "arrived": at, "wall": 1e9 + at, "deadline": 0}
    return {"request": "r", **own, **changed}


BATCH = {"batch": 1, "texts": 3, "tokens": 25, "stages": {}, "backbone": "b0"}
OLD = {key: value for key, value in _asked(1.0).items() if key != "wall"}  # before it, there was a line with both clocks


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
        ("a journal with a request of two texts.jsonl", [
            _asked(11.0, texts=2, tokens=20, deadline=11.25), BATCH, _asked(10.0, "b1/y"),
        ], [0, 1, 1], [1, 0, 0], [5, 10, 10], [0, 0.25, 0.25]),
    ],
)  # fmt: skip
def test_a_file_is_read_with_the_units_of_its_tenants(tmp_path, name, lines, arrival_s, unit, tokens, timeout_s):
    trace = read_trace([_written(tmp_path, *lines, name=name)], UNITS)
    assert trace.names == ("b0/law", "b1/law")
    assert (trace.arrival_ns / SECOND).tolist() == arrival_s and trace.unit.tolist() == unit
    assert trace.tokens.tolist() == tokens and (trace.timeout_ns / SECOND).tolist() == timeout_s


def test_journals_are_read_together_by_the_wall_clock_and_over_a_restart_of_the_machine(tmp_path):
    """The machine of the first one starts anew after its first request. A server without requests has an empty journal."""
    here = _written(
        tmp_path,
        _asked(5001.0, "b0/a", wall=1e9 + 1),
        _asked(8.125, "b1/a", wall=1e9 + 101.125),
        _asked(8.0, "b0/a", wall=1e9 + 101, deadline=8.25),
        name="here.jsonl",
    )
    there = _written(tmp_path, BATCH, _asked(50.0, "b1/a"), name="there.jsonl")
    own = profile(8.0, 8.0)
    trace = read_trace([here, _written(tmp_path, name="empty.jsonl"), there], units_by_name(own, units_of(own)))
    assert [trace.names[number] for number in trace.unit] == ["b0/law", "b1/law", "b0/law", "b1/law"]
    assert (trace.arrival_ns / SECOND).tolist() == pytest.approx([0, 49, 100, 100.125], abs=1e-6)
    assert trace.timeout_ns.tolist() == [0, 0, SECOND // 4, 0]


def test_what_killed_servers_have_left_is_counted_and_left_out(tmp_path):
    path = _written(tmp_path, HALF, _asked(1.0), HALF + json.dumps(_asked(2.0)), "", "[" * 10_000, "[1]", _asked(3.0))
    trace = read_trace([path], UNITS)
    assert trace.arrival_ns.tolist() == [0, 2 * SECOND] and mentions(trace.source, "5 broken lines")
    with open(path, "a") as file:
        file.write(HALF)  # a server is writing it just now
    assert len(read_trace([path], UNITS)) == 2
    with refusing(InvalidInput, "/dev/null", "pipe"):
        read_trace([path, Path("/dev/null")], UNITS)


def test_requests_of_a_journal_that_have_no_unit_are_left_out(tmp_path):
    own = profile(8.0)
    asked = [(2.0, "b0/new"), (3.0, "b0/a"), (4.0, "b9/a"), (5.0, "b0/new"), (6.0, "b0/b")]
    path = _written(tmp_path, *(_asked(at, name) for at, name in asked), _asked(7.0, "b0/new", texts=2))
    trace = read_trace([path], units_by_name(own, units_of(own)))
    assert trace.arrival_ns.tolist() == [0, 3 * SECOND]
    assert trace.left_out.figures == {"requests": 5, "tenants": 2, "most": ["b0/new", "b9/a"]}
    with refusing(InvalidInput, "71.4%", "b0/new", "b9/a"):
        trace.expect_known()


def test_a_tenant_with_the_name_of_another_domain_is_found(tmp_path):
    own = profile_of(bert=backbone_profile(tenants={"root": ("law",), "law": ("a",)}))
    units = units_by_name(own, units_of(own))
    rows = _asked(1.0, "bert/law"), _asked(2.0, "bert/a")
    trace = read_trace([_written(tmp_path, *rows)], units)
    assert [trace.names[number] for number in trace.unit] == ["bert/root", "bert/law"]
    recorded = _written(tmp_path, {"arrival": 1, "tokens": 2, "unit": "bert/law"})
    assert read_trace([recorded], units).unit.tolist() == [trace.names.index("bert/law")]


@pytest.mark.parametrize(
    "lines, named",
    [
        ([EARLY, HALF], ("line 2", "JSON")),
        ([HALF, EARLY], ("line 1", "JSON")),
        ([[1]], ("line 1", "JSON")),
        ([_asked(1.0, texts=10**12)], ("line 1", "1000000000000")),
        ([BATCH, OLD], ("line 2", "wall", "new journal")),
        ([{"clock": 1.0, "wall": 1e9}, OLD], ("line 2", "wall", "new journal")),
        *(([_asked(1.0, wall=wall)], ("line 1",)) for wall in ("then", None, float("nan"), 1e300)),
        ([], ("no requests",)),
        ([BATCH], ("no requests",)),
        ([{"batch": 1, "texts": 3}], ("line 1",)),
        ([{**EARLY, "arrival": 2}, EARLY], ("backwards", 2)),
        ([{**EARLY, "tenant": "z"}], ("'z'", "line 1")),
        ([{**EARLY, "tokens": 0}], (0, "tokens")),
        ([{**EARLY, "tokens": 3_000_000_000}], (3_000_000_000, 1 << 20)),
        ([{**EARLY, "arrival": 1e30}], ("line 1", "64 bits")),
        ([{**EARLY, "deadline_ms": 1e30}], ("line 1", "64 bits")),
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
    with refusing(InvalidInput, "--rate"):
        trace.at_rate(1e-9)
    twice = trace.at_rate(2.0)
    assert (twice.arrival_ns * 2 == at).all() and twice.seconds < trace.seconds and "x 2" in twice.source
    sampled = random_trace({"u": 100.0}, 100, 3.0).sampled(1600)
    assert 1500 <= len(sampled) <= 1600 and sampled.seconds > 80
