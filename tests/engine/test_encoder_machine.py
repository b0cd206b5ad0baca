"""Any order of requests, steps, faults and closing: each request gets one right answer, and nothing is held at the end."""

from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from testing.toy import WORDS
from tests.engine.asker import stages_of
from tests.engine.stepped import FAULTS
from tests.engine.world import World

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_logged")]

TENANTS = st.sampled_from(["acme", "acme", "beta", "city", "echo", "flux"])
TEXTS = st.lists(st.sampled_from([*WORDS[:4], " ".join(WORDS[5:15]), " ".join(WORDS[20:50])]), min_size=1, max_size=4)
STEPS = st.sampled_from(["prepare", "compute 1", "compute 2", "expire"])


class Encoders(RuleBasedStateMachine):
    def __init__(self, make):
        super().__init__()
        self.world = make()

    @rule(tenant=TENANTS, texts=TEXTS, due_ms=st.sampled_from([0, 0, 1, 15, 200]), priority=st.integers(0, 1))
    def offer(self, **given):
        self.world.offer(**given)

    @rule(ms=st.sampled_from([1, 20, 300]))
    def wait(self, ms):
        self.world.clock.sleep(ms / 1000)

    @rule(name=STEPS)
    def step(self, name):
        if name in self.world.names:
            self.world.step(name)

    @rule(name=st.sampled_from(["prepare", "expire"]))
    def step_while_a_batch_computes(self, name):
        self.world.meanwhile = partial(self.world.step, name)

    @rule(fault=st.sampled_from([*FAULTS]))
    def fail(self, fault):
        self.world.fault = fault

    @rule()
    def run(self):
        self.world.run_all()

    @precondition(lambda self: not self.world.closed)
    @rule(is_stuck=st.booleans(), while_it_computes=st.booleans())
    def close(self, is_stuck, while_it_computes):
        if while_it_computes:
            self.world.meanwhile = lambda: self.world.closed or self.world.close(is_stuck=True)
        else:
            self.world.close(is_stuck)

    def teardown(self):
        self.world.finish()
        self.world.end()


@pytest.fixture(scope="module")
def expected(reference):
    return lambda tenant, text: reference.forward(text, tenant).numpy()


CHANGES = [{"threads": "1"}, {"stages": stages_of(0, 1), "slots": "6"}, {"threads": "1", "policy": "das"}, {"threads": "2"}]


@pytest.fixture(autouse=True)
def small_batches_are_divided(monkeypatch):
    monkeypatch.setattr("hplm.engine.packing.WORTH", 4)


@pytest.mark.parametrize("changes", CHANGES)
def test_each_request_gets_one_right_answer_whatever_happens(toy, expected, changes):
    """Takes seconds: each example is an engine with real layers. A failing one is not made smaller: that takes minutes."""
    few = settings(max_examples=10, stateful_step_count=30, phases=[Phase.reuse, Phase.generate])
    run_state_machine_as_test(lambda: Encoders(partial(World, toy.folder, expected, **changes)), settings=few)


@pytest.mark.parametrize("changes", CHANGES)
def test_each_fault_and_a_late_answer_are_met_by_one_text_and_by_several(toy, expected, changes):
    for texts in (WORDS[:1], WORDS[:3]):
        world = World(toy.folder, expected, **changes)
        for fault, (place, _) in FAULTS.items():
            if place == "enter" and "stages" not in changes:
                continue
            world.fault = fault
            for tenant in ("acme", "city"):
                world.offer(tenant, texts)
            world.run_all()
            assert world.fault is None, f"{fault} has not come"
        world.finish()
        assert world.has_places == (changes.get("policy") == "das")
        assert world.has_overlapped == (changes.get("threads") == "2" and len(texts) > 1)
        stages = len(changes.get("stages", (None,)))  # each takes 10 ms for any batch
        assert world.cost.shares == pytest.approx([1 / stages] * stages) and world.cost.predict(10, 1) < 10**9
        world.offer("acme", texts)
        world.meanwhile = partial(world.close, is_stuck=True)  # its own answer comes too late
        world.run_all()
        assert world.closed
        world.finish()
        world.end()


def test_a_request_is_shown_while_it_is_staged_and_while_it_computes(toy, expected):
    """A disk that hangs while a batch is staged is no tenant's fault, unlike the end of a process."""
    world, seen = World(toy.folder, expected), []
    world.offer("acme", WORDS[:1])
    assert world.step("prepare") and world.shown(staged=True) == {0} and not world.shown(staged=False)
    world.meanwhile = lambda: seen.append(world.shown(staged=False))
    world.run_all()
    assert seen == [{0}] and not world.shown(staged=True)
    world.finish()
    world.end()
