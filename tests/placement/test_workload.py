import json

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.placement.traces import MINUTES, read_trace
from hplm.placement.workload import Trace, refitted, synthetic
from hplm.scheduling.simulation.arrivals import SECOND
from tests.support.message import mentioning

UNITS = {"x": "b0/law", "y": "b1/law"}


def _written(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
