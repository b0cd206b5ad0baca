"""The full simulator beside today's, of one server."""

from dataclasses import replace

import pytest

from hplm.placement.profile import Terms
from hplm.placement.screen import Screen, alone_ns
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate
from tests.placement.problems import backbone, group_of, profile, trace_of
from tests.placement.profiles import profile_of

ONE, TWO = profile(8.0), profile(8.0, 8.0)


def test_the_same_seed_gives_the_same_result():
    groups = [group_of(TWO, "g", ("cpu:0",), "b0", "b1"), group_of(TWO, "h", ("cpu:1", "cpu:2"), "b0", "b1")]
    first, second = (simulate(groups, TWO, trace_of(TWO, 150.0, 5.0), Serving(noise=0.1), 3) for _ in range(2))
    assert (first.end_ns == second.end_ns).all()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_screen_and_full_simulator_agree_at_a_light_load(stages):
    trace = trace_of(TWO, 25.0, 20.0, cv=1.0, scale=10.0)
    groups = [group_of(TWO, "g", tuple(f"cpu:{i}" for i in range(stages)), "b0", "b1")]
    screened, full = Screen(TWO, trace).attained(groups), simulate(groups, TWO, trace, Serving())
    assert full.share == pytest.approx(screened.share, abs=0.01)
    assert full.mean_ms() == pytest.approx(screened.mean_ms(), rel=0.1)


@pytest.mark.parametrize("batch_texts", [1, 4096])
def test_the_work_of_cores_for_each_text_keeps_them_from_computing(batch_texts):
    """Each text takes 8 ms to compute and 8 ms of its core: at 90 a second one core is too few, though it computes in time."""
    light, heavy = (profile_of(b0=replace(backbone(8.0), core=Terms(text_ns=core))) for core in (0.0, 8e6))
    group, serving = group_of(light, "g", ("cpu:0",), "b0"), Serving(batch_texts=batch_texts)
    trace = trace_of(light, 90.0, 10.0, cv=1.0, scale=20.0)
    shares = [simulate([group], own, trace, serving).share for own in (light, heavy)]
    screened = [Screen(own, trace).attained([group]).share for own in (light, heavy)]
    assert shares[0] > 0.95 and screened[0] > 0.95
    assert shares[1] < 0.8 and screened[1] < 0.8
    assert alone_ns(heavy, trace)[0] - alone_ns(light, trace)[0] == pytest.approx(8e6)


def test_admission_refuses_only_what_the_stages_cannot_answer_in_time():
    """By the time that a batch takes in both stages together, half of this load would be too much."""
    trace = trace_of(ONE, 230.0, 6.0, cv=1.0, scale=8.0)
    groups = [group_of(ONE, "g", ("cpu:0", "cpu:1"), "b0")]
    admitting, taking_all = (simulate(groups, ONE, trace, Serving(admission=admission)) for admission in (True, False))
    assert admitting.share > max(0.9, taking_all.share)


def test_requests_go_to_the_shorter_queue():
    trace = trace_of(ONE, 160.0, 10.0, cv=1.0, scale=6.0)
    groups = [group_of(ONE, name, (device,), "b0") for name, device in (("g", "cpu:0"), ("h", "cpu:1"))]
    attained = simulate(groups, ONE, trace, Serving())
    assert attained.busy_ns.min() > 0.5 * attained.busy_ns.max()  # idle groups: the first one is chosen
    assert attained.share > 1.4 * simulate(groups[:1], ONE, trace, Serving()).share
