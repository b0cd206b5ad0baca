"""The screen, in C and in Python, and the simulator of what serves: what queueing theory says of them, and where they agree."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.placement import kernel as kernels
from hplm.placement.profile import Terms
from hplm.placement.screen import Screen, alone_ns
from hplm.placement.simulation import ServerSettings, simulate
from hplm.placement.stepping import Steps
from testing.random_trace import random_trace
from tests.placement.problems import backbone, group_of, profile, profile_of, trace_of
from tests.support.needed import needs_kernel

ONE, TWO = profile(8.0), profile(8.0, 5.0)


@needs_kernel(vectors=False)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6), rate=st.sampled_from([20.0, 120.0, 500.0]), scale=st.sampled_from([1.5, 5.0, 40.0]),
    most=st.sampled_from([1, 2, 7]), layout=st.integers(0, 3),
)  # fmt: skip
def test_the_kernel_computes_what_python_does(seed, rate, scale, most, layout):
    groups = [
        [group_of(TWO, "g", ("cpu:0",), "b0"), group_of(TWO, "h", ("cpu:1", "cpu:2"), "b0", "b1")],
        [group_of(TWO, "g", ("cpu:0", "cpu:1", "cpu:2", "cpu:3"), "b0", "b1", intra=2)],
        [group_of(TWO, "g", ("cpu:0",), "b1")],
        [],
    ][layout]
    screen = Screen(TWO, trace_of(TWO, rate, 3.0, scale=scale, seed=seed), most)
    compiled, python = screen.case(groups), screen.case(groups)
    assert kernels.run(compiled, most)
    Steps(python, most).run()
    for name in ("end", "busy", "clock"):
        assert (getattr(compiled, name) == getattr(python, name)).all(), name


@pytest.mark.parametrize("most", [1, 1 << 64])
def test_no_text_is_answered_late_or_before_it_could_be(most):
    trace = trace_of(TWO, 200.0)
    groups = [group_of(TWO, "g", ("cpu:0",), "b0", "b1"), group_of(TWO, "h", ("cpu:1", "cpu:2"), "b0")]
    attained = Screen(TWO, trace, most).attained(groups)
    assert 0.1 < attained.share < 1
    assert (attained.latency_ns <= trace.timeout_ns[attained.served]).all()
    assert (attained.latency_ns >= alone_ns(TWO, trace)[attained.served] - 1).all()
    assert (attained.busy_ns <= trace.seconds * 1e9 + trace.timeout_ns.max()).all()


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_device_is_the_queue_of_the_textbook(load):
    """M/D/1 (AlpaServe 3.4): the mean latency is D + load D / (2 (1 - load))."""
    one = profile(8.0)
    trace = random_trace({"b0/law": load / 0.008}, 1000, seed=4)
    trace = trace.with_timeouts(np.full(len(trace), 10**12))
    mean_ms = Screen(one, trace).attained([group_of(one, "g", ("cpu:0",), "b0")]).mean_ms()
    assert mean_ms == pytest.approx(0.1 + 8 + load * 8 / (2 * (1 - load)), rel=0.05)


def test_batches_hold_one_backbone_and_save_what_a_batch_costs():
    own = profile(8.0, 8.0)
    trace = trace_of(own, 300.0, scale=20.0)
    group = [group_of(own, "g", ("cpu:0",), "b0", "b1")]
    one, many = (Screen(own, trace, most).attained(group) for most in (1, 8))
    ends = {name: set(many.end_ns[(trace.unit == i) & many.served]) for i, name in enumerate(trace.names)}
    assert not ends["b0/law"] & ends["b1/law"]
    assert len(ends["b0/law"]) < np.count_nonzero((trace.unit == 0) & many.served)  # some share a batch
    assert abs(many.share - one.share) < 0.1  # tokens are all that these backbones cost


@pytest.mark.parametrize("most", [1, 4])
def test_units_of_the_same_groups_wait_in_one_line(most):
    """As if all their texts were of one unit. A unit that only one of the groups serves has a line of its own."""
    own = profile_of(b0=replace(backbone(8.0), tenants={"law": ("a",), "bio": ("b",)}, table_bytes={"law": 1, "bio": 1}))
    trace = trace_of(own, 300.0, 5.0)
    one, other = (group_of(own, name, (f"cpu:{i}",), "b0") for i, name in enumerate("gh"))
    both = replace(one, units=("b0/law", "b0/bio"))
    together, apart = ([both, replace(other, units=both.units)], [both, other])
    screened = Screen(own, trace, most).attained(together)
    assert (screened.end_ns == Screen(own, replace(trace, unit=0 * trace.unit), most).attained(together).end_ns).all()
    assert 0.1 < Screen(own, trace, most).attained(apart).share < screened.share < 1


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_screen_and_simulator_agree_at_a_light_load(stages):
    trace = trace_of(TWO, 25.0, 20.0, cv=1.0, scale=10.0)
    groups = [group_of(TWO, "g", tuple(f"cpu:{i}" for i in range(stages)), "b0", "b1")]
    screened, full = Screen(TWO, trace).attained(groups), simulate(groups, TWO, trace, ServerSettings())
    assert full.share == pytest.approx(screened.share, abs=0.01)
    assert full.mean_ms() == pytest.approx(screened.mean_ms(), rel=0.1)


@pytest.mark.parametrize("batch_texts", [1, 4096])
def test_the_work_of_cores_for_each_text_keeps_them_from_computing(batch_texts):
    """Each text takes 8 ms to compute and 8 ms of its core: at 90 a second one core is too few, though it computes in time."""
    light, heavy = (profile_of(b0=replace(backbone(8.0), core=Terms(text_ns=core))) for core in (0.0, 8e6))
    group, serving = group_of(light, "g", ("cpu:0",), "b0"), ServerSettings(batch_texts=batch_texts)
    trace = trace_of(light, 90.0, 5.0, cv=1.0, scale=20.0)
    shares = [simulate([group], own, trace, serving).share for own in (light, heavy)]
    screened = [Screen(own, trace).attained([group]).share for own in (light, heavy)]
    assert shares[0] > 0.95 and screened[0] > 0.95
    assert shares[1] < 0.8 and screened[1] < 0.8
    assert alone_ns(heavy, trace)[0] - alone_ns(light, trace)[0] == pytest.approx(8e6)


def test_admission_refuses_only_what_the_stages_cannot_answer_in_time():
    """By the time that a batch takes in both stages together, half of this load would be too much."""
    trace = trace_of(ONE, 230.0, 6.0, cv=1.0, scale=8.0)
    groups = [group_of(ONE, "g", ("cpu:0", "cpu:1"), "b0")]
    admitting, taking_all = (simulate(groups, ONE, trace, ServerSettings(admission=admission)) for admission in (True, False))
    assert admitting.share > max(0.9, taking_all.share)


def test_the_engines_of_a_group_share_its_devices():
    """A backbone gets its part of a core that both need, and one of several cores, also while the other is idle."""
    trace = trace_of(TWO, 100.0, 6.0, cv=1.0, scale=6.0)
    apart = [group_of(TWO, name, (f"cpu:{name}",), name) for name in TWO.backbones]
    both = group_of(TWO, "g", ("cpu:0",), "b0", "b1")
    alone, shared = simulate(apart, TWO, trace, ServerSettings()), simulate([both], TWO, trace, ServerSettings())
    assert shared.share < 0.85 * alone.share and shared.busy_ns[0] < 1.1e9 * trace.seconds
    assert min(shared.by_unit.values()) > 0.5
    light, cores = trace_of(TWO, 5.0, cv=1.0, scale=20.0), ("cpu:0", "cpu:1")
    one, two = (
        simulate([group_of(TWO, "g", cores, *own, intra=2)], TWO, light, ServerSettings()) for own in (["b0"], ["b0", "b1"])
    )
    assert one.by_unit["b0/law"] == two.by_unit["b0/law"] == 1
    mean_ms = [(own.end_ns - light.arrival_ns)[light.unit == light.names.index("b0/law")].mean() / 1e6 for own in (one, two)]
    assert mean_ms == pytest.approx([0.1 + 0.6 * 8, 0.1 + 2 * 0.6 * 8], rel=0.1)


def test_settings_of_servers_are_read_as_in_their_configuration():
    parameters = {"commit_ms": "earliest", "batch_ms": "7", "batch_texts": "3", "admission": "false"}
    assert ServerSettings.of(parameters) == ServerSettings(commit_ns=None, batch_ns=7_000_000, batch_texts=3, admission=False)


def test_requests_go_to_the_shorter_queue():
    trace = trace_of(ONE, 160.0, 5.0, cv=1.0, scale=6.0)
    groups = [group_of(ONE, name, (device,), "b0") for name, device in (("g", "cpu:0"), ("h", "cpu:1"))]
    attained = simulate(groups, ONE, trace, ServerSettings())
    assert attained.busy_ns.min() > 0.5 * attained.busy_ns.max()  # idle groups: the first one is chosen
    assert attained.share > 1.4 * simulate(groups[:1], ONE, trace, ServerSettings()).share
