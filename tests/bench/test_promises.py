"""The simulation of decoders under overload, small."""

import math

from bench.measuring.promises import bench_promises, table_of
from bench.promises import PromisesBench

CASE = PromisesBench(requests=100, rates=(0.5, 2.0), policies=("timely", "fcfs"), seats=8, cache_tokens=1024)


def test_every_rate_and_policy_gives_its_shares():
    figures = bench_promises(CASE)
    assert list(figures["rates"]) == ["0.5", "2.0"] and figures["capacity_per_s"] > 0
    for cell in (*figures["rates"]["0.5"].values(), *figures["rates"]["2.0"].values(), *figures["without_admission"].values()):
        refused, of_admitted, on_time = cell.values()
        assert 0 <= refused <= 1 and math.isclose(on_time, (1 - refused) * of_admitted, abs_tol=1e-3)
    easy, hard = (figures["rates"][rate]["timely"] for rate in ("0.5", "2.0"))
    assert easy["refused"] < 0.1 < hard["refused"] and easy["on_time"] > hard["on_time"]
    assert figures["without_admission"]["2.0"]["refused"] == 0
    assert set(figures["targets"]) == {"timely_in_time_at_2", "fcfs_in_time_at_2"}
    assert all(name in table_of(figures) for name in (*CASE.policies, *figures["targets"]))
