"""AlpaServe's baselines place as they say, and Azure's functions become its loads."""

from dataclasses import replace

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.placement.placement import Placement
from hplm.placement.traces import read_trace
from research.papers.azure import MINUTES, azure
from research.papers.placements import clockwork, greedy, manual, replication, round_robin
from tests.placement.problems import problem_of
from tests.support.message import refusing


@pytest.mark.parametrize(("place", "stages"), [(round_robin(2), 2), (greedy(2), 2), (manual(1, 2), 1), (replication, 1)])
def test_baselines_cut_as_they_say(place, stages):
    problem = problem_of(8.0, 6.0, devices=4, memory_mb=80)
    found = place(problem)
    assert found.groups and all(group.stages == stages for group in found.groups)
    Placement.of(found.groups, problem.units, problem.cluster, problem.profile).check(problem.cluster, problem.profile)
    assert 0 < found.attained.share <= 1


def test_clockwork_places_each_window_anew():
    """One device holds one of two backbones, which take turns: a placement for all of the time serves half."""
    problem = problem_of(8.0, 8.0, devices=1, memory_mb=40, rate=20.0, seconds=20.0, scale=20.0)
    turn = (problem.trace.arrival_ns // 5_000_000_000) % 2
    problem = problem.on(replace(problem.trace, unit=turn.astype(np.int64)))
    assert clockwork(5)(problem).attained.share > 0.9
    assert replication(problem).attained.share < 0.7


def test_azures_functions_go_to_the_units_in_turn(tmp_path):
    minutes = list(map(str, range(1, MINUTES + 1)))
    counts = [dict.fromkeys(minutes, "0") | more for more in ({"1": "5"}, {"3": "7"}, {"1440": "11"})]
    of_2019 = [",".join(["HashFunction", *minutes]), *(",".join([f"f{i}", *own.values()]) for i, own in enumerate(counts))]
    of_2021 = ["app,func,end_timestamp,duration", "a,f,10.5,0.5", "a,g,10.75,1.0", "a,f,12.0,1.0"]
    to, source = tmp_path / "trace.jsonl", tmp_path / "azure.csv"

    def read(lines):
        source.write_text("\n".join(lines) + "\n")
        assert [row.value for row in azure(source, units=["b0/law", "b1/law"], to=to)] == [len(to.read_text().splitlines())]
        return read_trace([to], {"b0/law": "b0/law", "b1/law": "b1/law"})

    trace = read(of_2019)
    assert trace.counts.tolist() == [16, 7] and trace.arrival_ns[-11] - trace.arrival_ns[-12] > 1436 * 60 * 10**9
    trace = read(of_2021)
    assert (trace.arrival_ns / 1e9).tolist() == [0, 0.25, 1.25] and trace.unit.tolist() == [1, 0, 0]
    with refusing(InvalidInput, source.name, "line 2"):
        read(["app,func,end_timestamp,duration", "a,f,now,0.5"])
