"""TCB's figures from short simulations."""

import pytest

from bench.measuring.tcb import bench_tcb, table_of
from bench.measuring.tcb_picture import draw
from bench.tcb import TcbBench

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return bench_tcb(TcbBench(0.4, rows=(4, 16), row_tokens=(100,), slots=(1, 4), variances=(20,), rates=(0.5, 3.0)))


def test_concatenation_answers_more_than_padding(found):
    for ratios in found["to_concat"].values():
        assert ratios["to_naive"] > ratios["to_turbo"] > 1


def test_each_axis_has_every_policy(found):
    assert list(found["rows"]) == ["4", "16"] and list(found["slots"]) == ["1", "4", "chosen"]
    for axis in ("rows", "variances", "row_tokens"):
        for by_policy in found[axis].values():
            assert by_policy.keys() == {"DAS", "SJF", "FCFS", "EDF", "timely"}
            assert by_policy["DAS"]["utility"] > by_policy["FCFS"]["utility"]
    light = found["packings"]["DAS var20"]["0.5"]
    assert light["concat"]["utility"] > 0.99 and 0 < light["concat"]["choosing_share"] < 1


def test_figures_are_printed_and_drawn(found, tmp_path):
    assert "Slotted-DAS" in table_of(found)
    draw(found, tmp_path / "tcb.svg")
    assert (tmp_path / "tcb.svg").read_text().startswith("<?xml")
