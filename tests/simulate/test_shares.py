"""Tenants that always have requests waiting get equal parts of all tokens, on a virtual clock."""

import pytest

from hplm.generation.settings import Settings
from hplm.simulate.decoders import Simulation, StepCost
from tests.generation.fake import Fake
from tests.generation.world import World, greedy

MS = 1_000_000
TENANTS, WAITING = 8, 6


class Busy:
    """Tenants that ask again as soon as one of their answers has ended. The first one asks for more than the others."""

    def __init__(self, n=1, wanted=40, prompt=20, **settings):
        self.simulation = Simulation(Settings(max_sequences=16, admission=False, **settings), StepCost())
        self.first = {"n": n, "wanted": wanted, "prompt": prompt}
        self.asked = [[] for _ in range(TENANTS)]

    def run(self, seconds):
        ends = self.simulation.now_ns + seconds * 1000 * MS
        while self.simulation.now_ns < ends:
            for tenant, own in enumerate(self.asked):
                given = {"n": 1, "wanted": 40, "prompt": 20} if tenant else self.first
                while sum(not answer.request.ended for answer in own[-2 * WAITING :]) < WAITING:
                    own.append(self.simulation.ask(most=given["wanted"], tenant=tenant, **given))
            self.simulation.step()

    def shares(self):
        generated = [sum(answer.request.generated for answer in own) for own in self.asked]
        return [own / sum(generated) for own in generated]


@pytest.mark.parametrize("settings", [{}, {"cache_tokens": 2048}, {"policy": "fcfs"}])
@pytest.mark.parametrize("more", [{}, {"n": 16}, {"wanted": 400}, {"prompt": 400}])
def test_nobody_gets_more_by_several_choices_or_longer_texts(more, settings):
    busy = Busy(**more, **settings)
    busy.run(15)
    shares = busy.shares()
    assert shares[0] < 1.1 / TENANTS and min(shares[1:]) > 0.9 / TENANTS, shares


def test_a_lone_tenant_has_all():
    """Shares hold nobody back while nobody else waits."""
    simulation = Simulation(Settings(max_sequences=16, admission=False), StepCost())
    answer = simulation.ask(20, 40, 40, tenant=1, n=16)
    for _ in range(4):
        simulation.step()
    assert answer.request.generated > 16, "not all choices run at once"


def test_further_choices_wait_as_requests_of_their_tenant_do():
    """With two sequences at once, another tenant comes between the first choice and the others, which no policy sees."""
    world = World(Fake(), seats=2)
    many = world.ask([3], greedy(6, n=4))
    world.step()
    other = world.ask([4], greedy(3), tenant=1)
    late = world.ask([5], greedy(3), tenant=0)
    world.run()
    assert other.request.first_token_ns < late.request.first_token_ns
    ends = [many.pieces.index(next(one for one in many.pieces if one.choice == choice and one.finish)) for choice in range(4)]
    assert ends == sorted(ends)
    assert all(world.assert_right(said) for said in world.said)


@pytest.mark.parametrize("alone", [{1}, {1, 2}])
def test_who_runs_alone_shares_no_step_and_all_get_on(alone):
    """Such a tenant may have ended an engine. Others have steps between its own."""
    world = World(Fake(), seats=8)
    world.loop.alone = frozenset(alone)
    asked = [world.ask([3, 4, 5], greedy(10), tenant, seed=number) for number, tenant in enumerate((0, 1, 2, 3, 1))]
    steps, stage = [], world.stager.stage
    world.stager.stage = lambda planned, broken: (
        steps.append({one.sequence.tenant for one in planned}),
        stage(planned, broken),
    )[1]
    world.run()
    together = {0, 1, 2, 3} - alone
    assert all(step <= together or step in [{tenant} for tenant in alone] for step in steps)
    turns = len(alone) + 1
    assert [step in steps[:turns] for step in (together, *({tenant} for tenant in alone))] == [True] * turns
    assert all(world.assert_right(said) == 10 for said in asked)


def test_others_start_beside_a_long_prompt():
    """A prompt of many steps of one tenant holds up no short one of another."""
    world = World(Fake(), step_tokens=16)
    long = world.ask([3] * 300, greedy(3))
    world.step(2)
    short = world.ask([4] * 6, greedy(3), tenant=1)
    world.step(2)
    assert short.request.generated and not long.request.generated
    world.run()
    assert all(world.assert_right(said) for said in world.said)
