"""Tenants that run alone: while a text of one is in a batch, no other tenant's text is in any batch. Nobody waits for ever."""

import itertools
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import OURS, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.waiting import Capacity
from hplm.simulate.arrivals import SimulatedText

MS = 1_000_000
ROOM = Capacity(100, 8, 4, in_flight=3)
TEXTS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(0, 2), st.booleans()), max_size=40)


@pytest.mark.parametrize("given_policy", OURS)
@given(drawn=TEXTS, alone=st.frozensets(st.integers(0, 4)), memory=st.integers(0, 3))
def test_they_share_the_engine_with_nobody_and_all_texts_are_served(given_policy, drawn, alone, memory):
    """`memory`: every so many-th batch finds none on the device, and is halved."""
    scheduler = Scheduler(policy(given_policy), Limits(10**6, 10**9), others=[policy(given_policy)])
    scheduler.alone = alone
    running, served, batches, now = deque(), 0, itertools.count(1), 0
    arriving = deque(
        SimulatedText(tokens=tokens, arrival_ns=0, deadline_ns=0, tenant=tenant, slot_key=tenant, backbone=tenant % 2,
                      number=number, priority=priority)
        for number, (tenant, tokens, priority, _) in enumerate(drawn)
    )  # fmt: skip
    moves = deque(finishes for *_, finishes in drawn)

    def finish():
        batch = running.popleft()
        if memory and not next(batches) % memory and scheduler.halve(batch, batch.texts, now):
            return 0
        scheduler.finished(batch, now + MS)
        return len(batch.texts)

    while arriving or running or len(scheduler):
        now += MS
        if arriving:
            scheduler.offer([arriving.popleft()], now)
        batch = scheduler.choose(ROOM, now)
        if batch is not None:
            scheduler.started(batch, now)
            running.append(batch)
            in_flight = {text.tenant for own in running for text in own.texts}
            assert len(in_flight) == 1 or not in_flight & alone
        elif not arriving:
            assert running  # or those that wait would wait for ever
        if running and (batch is None or (moves and moves.popleft())):
            served += finish()
    assert served == len(drawn)
