"""A request that admission refuses takes no place from others. Who loses a place: `test_line`."""

import pytest

from hplm.errors import DeadlineMissed
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.waiting import Capacity

ROOM = Capacity(tokens=40, texts=4, tenants=4)
LIMITS = Limits(texts=24, bytes=2400)


def _texts(tenant, count=1, size=1, deadline=0):
    return [SimulatedText(tokens=10, bytes=size, arrival_ns=0, deadline_ns=deadline, tenant=tenant) for _ in range(count)]


def test_a_request_that_admission_refuses_displaces_nobody():
    scheduler, now = Scheduler(policy("timely"), LIMITS, admission=True), 0
    for _ in range(20):
        scheduler.offer(_texts("noisy", 4), now)
        batch = scheduler.choose(ROOM, now)
        scheduler.started(batch, now)
        now += 10**9
        scheduler.finished(batch, now)
    for _ in range(24):
        scheduler.offer(_texts("noisy"), now)
    with pytest.raises(DeadlineMissed):
        scheduler.offer(_texts("quiet", deadline=now + 1), now)
    assert len(scheduler) == 24
    assert len(scheduler.offer(_texts("quiet", deadline=now + 10**12), now)) == 1
