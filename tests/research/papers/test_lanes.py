"""Lanes of students, by hand: Eq. 6, the slowest member, the buffer, and the waiting queue."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.simulate.arrivals import Arrivals
from research.papers import lanes as ours
from research.papers.lanes import Node, batch_ms, fixed, lanes, rotating


def latencies(node: Node, at_ms: list[float], tokens: list[int]) -> list[float]:
    zeros = np.zeros(len(at_ms), np.int64)
    return node.run(Arrivals((1e6 * np.array(at_ms)).astype(np.int64), np.array(tokens), zeros, zeros, zeros))[0].tolist()


def near(*expected: float) -> object:
    return pytest.approx(expected, abs=1e-4)  # whole nanoseconds


@given(members=st.integers(1, 9), count=st.integers(1, 9), batches=st.integers(1, 30))
def test_by_eq_6_no_lane_has_two_members_more_than_another(members: int, count: int, batches: int) -> None:
    placed = Counter(rotating(member, batch, members, count) for batch in range(batches) for member in range(members))
    counts = [placed[lane] for lane in range(count)]
    assert sum(counts) == members * batches and max(counts) - min(counts) <= 1


def test_an_answer_needs_the_slowest_member(monkeypatch) -> None:
    one = batch_ms(2, 16, 3)
    monkeypatch.setattr(ours, "GROUPS", 1)  # a lane computes one student at a time
    assert latencies(Node(2, students=3), [0], [16]) == near(one)
    assert latencies(Node(2, students=3, lane=lambda *given: 0), [0], [16]) == near(3 * one)


def test_members_on_one_lane_wait_for_each_other(monkeypatch) -> None:
    monkeypatch.setattr(ours, "GROUPS", ours.DEVICES)
    assert latencies(Node(2), [0, 0], [8, 16]) == near(batch_ms(2, 8), batch_ms(2, 16))
    assert latencies(Node(2, lane=fixed), [0, 0], [8, 16]) == near(batch_ms(2, 8), batch_ms(2, 8) + batch_ms(2, 16))


def test_the_buffer_joins_texts_of_a_bin_only_while_all_groups_compute(monkeypatch) -> None:
    monkeypatch.setattr(ours, "GROUPS", 1)
    short, longer = batch_ms(2, 16), batch_ms(2, 32)
    found = latencies(Node(2, texts=2), [0, 0.1, 0.2, 0.3, 0.4], [10, 9, 30, 12, 16])  # the last one finds its batch full
    assert found == near(short, 2 * short - 0.1, 2 * short + longer - 0.2, 2 * short - 0.3, 3 * short + longer - 0.4)


def test_the_waiting_queue_ends_with_a_full_batch_or_its_window() -> None:
    one = batch_ms(4, 128)
    found = latencies(Node(4, 3, 5.0), [0, 1, 2, 3, 6, 20], [128] * 6)
    assert found == near(2 + one, 1 + one, one, 5 + one, 2 + one, 5 + one)


@pytest.mark.slow
def test_means_are_nearly_those_of_the_paper_and_eq_6_is_faster_under_load() -> None:
    found = {row.name: row for row in lanes(seconds=0.5, rates=(6000.0,))}
    assert not [row.name for row in found.values() if row.missed]
    means = {name: row.value for name, row in found.items() if name.endswith("/mean_ms") and name.startswith("table")}
    assert len(means) == 5 and means == pytest.approx({name: found[f"{name}_stated"].value for name in means}, rel=0.05)
    assert found["lanes/6000/fixed over Eq. 6/times_as_long"].value == pytest.approx(1.36, abs=0.1)
