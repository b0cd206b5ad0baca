"""The full simulator beside today's, of one server."""

from dataclasses import replace

import numpy as np
import pytest

from hplm.engine.service import ANSWERING_NS
from hplm.placement.profile import Terms
from hplm.placement.screen import Screen, alone_ns
from hplm.placement.servers import GroupServer, Serving, Stages
from hplm.placement.simulation import simulate
from hplm.scheduling.simulation.arrivals import Arrivals
from hplm.scheduling.simulation.engines import one_stage
from hplm.scheduling.simulation.server import Machine, Simulation
from hplm.scheduling.waiting import Capacity
from tests.placement.problems import backbone, group_of, profile, trace_of
from tests.placement.profiles import profile_of

ONE, TWO = profile(8.0), profile(8.0, 8.0)


@pytest.mark.parametrize("admission", [False, True])
@pytest.mark.parametrize("rate, commit_ns", [(40.0, 5_000_000), (110.0, 0), (300.0, None)])
def test_a_cluster_of_one_group_is_todays_simulation_event_for_event(rate, commit_ns, admission):
    trace = trace_of(ONE, rate, 10.0, scale=6.0)
    group = group_of(ONE, "g", ("cpu:0",), "b0")
    serving = Serving(commit_ns=commit_ns, admission=admission, noise=0.1)
    stages = Stages(group, ONE, trace)

    def batch_ns(lengths, places):
        return stages.ns(0, int(lengths.sum()), int((lengths**2).sum()), len(lengths))[0]

    machine = Machine(
        one_stage(batch_ns), Capacity(serving.batch_tokens, serving.batch_texts, serving.batch_texts),
        answering_ns=int(stages.around_ns), noise=0.1,
    )  # fmt: skip
    none = np.zeros(len(trace), np.int64)
    arrivals = Arrivals(trace.arrival_ns, trace.tokens, trace.timeout_ns, trace.unit, none)
    today = Simulation(serving.scheduler(stages), machine, arrivals, seed=5).run()
    attained = simulate([group], ONE, trace, serving, seed=5)
    assert (attained.end_ns[attained.served] == today.answered_ns[today.on_time]).all()
    assert (attained.served == today.on_time).all() and today.on_time.any()
    assert attained.busy_ns[0] == today.busy_ns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_by_itself_is_todays_simulation_with_its_stages(stages, seed):
    own = profile(8.0, 13.0)
    group = group_of(own, "g", tuple(f"cpu:{number}" for number in range(stages)), "b0", "b1")
    trace = trace_of(own, 100.0 + 60 * seed, 4.0, scale=6.0, seed=seed)
    serving = Serving(batch_texts=1 + 3 * seed, admission=seed % 2 == 0, noise=0.1)
    times = Stages(group, own, trace)
    capacity = Capacity(serving.batch_tokens, serving.batch_texts, serving.batch_texts, in_flight=stages + 1)
    machine = Machine(times.batch_ns, capacity, answering_ns=int(times.around_ns), noise=0.1, stages=stages)
    none = np.zeros(len(trace), np.int64)
    arrivals = Arrivals(trace.arrival_ns, trace.tokens, trace.timeout_ns, trace.unit, none)

    class OfBackbones(Simulation):
        def arrive(self, text, now):
            super().arrive(replace(text, backbone=times.backbone_of[text.tenant]), now)

    today = OfBackbones(serving.scheduler(times), machine, arrivals, seed=seed).run()
    attained = simulate([group], own, trace, serving, seed=seed)
    assert (attained.served == today.on_time).all() and today.on_time.any()
    assert (attained.end_ns[attained.served] == today.answered_ns[today.on_time]).all()


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


def test_the_cores_of_a_stage_divide_their_other_work():
    """Each text takes 4.8 ms of both cores, and 12 ms of one: at 75 a second two cores are enough."""
    heavy = profile_of(b0=replace(backbone(8.0), core=Terms(text_ns=12e6)))
    groups = [group_of(heavy, "g", ("cpu:0", "cpu:1"), "b0", intra=2)]
    trace = trace_of(heavy, 75.0, 10.0, cv=1.0, scale=20.0)
    assert simulate(groups, heavy, trace, Serving()).share > 0.95
    assert Screen(heavy, trace).attained(groups).share > 0.95


def test_a_text_alone_takes_the_time_of_its_stages_on_the_fewest_devices_that_were_measured():
    own = replace(backbone(8.0), core=Terms(text_ns=12e6))
    own = replace(own, times={2: own.times[2]})
    (stage,) = own.stages(Terms(), 2, [(0, own.layers - 1)])
    assert own.alone().ns(64, 64**2) == pytest.approx((stage + own.around).ns(64, 64**2)) == pytest.approx(4.8e6 + 6e6 + 1e5)


def test_servers_and_simulated_ones_allow_the_same_time_for_an_answer():
    assert Serving().answering_ns == ANSWERING_NS


def test_two_stages_answer_more_than_one_device_does():
    trace = trace_of(ONE, 180.0, 10.0, cv=1.0, scale=8.0)
    one, two = (
        simulate([group_of(ONE, "g", devices, "b0")], ONE, trace, Serving()) for devices in (("cpu:0",), ("cpu:0", "cpu:1"))
    )
    assert two.share > 1.4 * one.share


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


def test_a_queue_is_empty_once_all_texts_have_left():
    trace = trace_of(TWO, 150.0, 3.0)
    left: list[float] = []

    class Watched(GroupServer):
        def advance(self, now):
            super().advance(now)
            left.append(self.queue_ns)

    from hplm.placement import simulation

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulation, "GroupServer", Watched)
        simulate([group_of(TWO, "g", ("cpu:0",), "b0", "b1")], TWO, trace, Serving())
    assert left[-1] == 0 and max(left) > 0 and min(left) >= 0
