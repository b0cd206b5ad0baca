"""The order in which sequences start, the tenants' shares of steps, and the memory of waiting requests."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.generation.request import DecoderRequest, Sequence
from hplm.generation.running import LEAST_CHUNK
from hplm.generation.sampling import Sampling
from hplm.scheduling.cost import CostModel
from tests.generation.fake import Fake
from tests.generation.world import MS, World, greedy


@pytest.mark.parametrize(
    ("tokens", "more", "echo"),
    [
        (10_000, {}, 0),
        (10_000, {"echo": True}, 100_000),
        (1_000, {"stop": lambda: tuple("水" * 256 for _ in range(16))}, 0),
        (100, {"logit_bias": lambda: {1000 + i: i / 7 for i in range(1024)}}, 0),
        (100, {"stop_token_ids": lambda: tuple(1000 + i for i in range(1024))}, 0),
    ],
)
def test_the_memory_of_waiting_requests_is_counted(tokens, more, echo):
    """By what is counted, `queue_mb` bounds what is kept."""
    ids, source = np.arange(1000, 1000 + tokens), Fake().pinned[0]
    tracemalloc.start()
    try:
        sampling = Sampling(**{name: value() if callable(value) else value for name, value in more.items()})
        given = {"arrival_ns": 1, "seed": 1, "echo": "水" * echo}
        sequence = Sequence(DecoderRequest(source, ids.tolist(), sampling, print, lambda ids: "", **given))
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * kept < sequence.bytes < 1.5 * kept


@pytest.mark.parametrize(("order", "priority", "late_first"), [("fcfs", 0, False), ("sjf", 0, True), ("fcfs", 1, True)])
def test_policies_and_priorities_choose_who_starts(order, priority, late_first):
    """The later request is shorter."""
    world = World(Fake(), max_sequences=1, order=order)
    world.ask([3], greedy(3))
    world.step()
    early, late = (world.ask([3] * size, greedy(3), priority=own) for size, own in ((30, 0), (5, priority)))
    world.run()
    assert (late.request.first_token_ns < early.request.first_token_ns) == late_first


def test_a_claimed_arrival_takes_no_room_from_those_before():
    """Both start, as if answers were short. The world sees whether the oldest is put back."""
    world = World(Fake(), tokens=64, max_sequences=2, share=0.1)
    early, late = (world.ask([3] * 8, greedy(40), waited_ns=waited) for waited in (0, 10**12))
    while not early.ended:
        world.step()
    assert not late.ended
    world.run()


def test_what_waits_starts_when_another_one_has_ended_while_the_others_go_on():
    """Early cleaning (TCB 4.2.2): what it held is free before the next step."""
    world = World(Fake(), max_sequences=2)
    short, long, waits = (world.ask([3], greedy(most)) for most in (5, 60, 50))
    while not short.ended:
        world.step()
    assert not waits.request.generated
    world.step()
    assert waits.request.generated and not long.ended
    world.run()


@pytest.mark.parametrize(("token_ns", "prompts"), [(MS, 2 * 11), (0, 253), (10 * MS, LEAST_CHUNK)])
def test_pieces_of_prompts_take_twice_the_time_of_a_step_without_them(token_ns, prompts):
    """A step of the one sequence that grows takes 11 times a token's. In any case prompts get on."""
    running, growing = World(Fake(), tokens=4096, step_tokens=256).running, SimpleNamespace(uncomputed=1)
    cost = CostModel()
    for tokens in (1, 10, 100, 200) * 10:
        cost.observe(tokens, 1, 0, int((10 * MS if token_ns == MS else 5 * MS) + tokens * token_ns))
    running.sequences = [growing, SimpleNamespace(uncomputed=3000)]
    assert running.most_tokens(cost) == pytest.approx(1 + prompts, rel=0.1)
    for alone in running.sequences:
        running.sequences = [alone]
        assert running.most_tokens(cost) == 256
    running.sequences = [growing, SimpleNamespace(uncomputed=3000)]
    assert running.most_tokens(CostModel()) == 256, "it knows no times yet"


TENANTS, WAITING = 8, 6


@pytest.mark.parametrize("settings", [{}, {"tokens": 2048}, {"order": "timely"}])
@pytest.mark.parametrize("more", [{}, {"n": 16}, {"most": 400}, {"prompt": 400}])
def test_no_tenant_gets_more_by_several_choices_or_longer_texts(more, settings):
    """Tenants ask again as soon as one of their answers has ended. The first one asks for more than the others."""
    world, asked = World(Fake(TENANTS), **{"tokens": 4096, **settings}, max_sequences=16), [[] for _ in range(TENANTS)]
    for _ in range(250):
        for tenant, own in enumerate(asked):
            given = {"n": 1, "most": 40, "prompt": 20} | ({} if tenant else more)
            while sum(not said.ended for said in own[-2 * WAITING :]) < WAITING:
                own.append(world.ask([3] * given["prompt"], greedy(given["most"], n=given["n"]), tenant))
        world.loop.step()
    generated = [sum(said.request.generated for said in own) for own in asked]
    shares = [own / sum(generated) for own in generated]
    assert shares[0] < 1.1 / TENANTS and min(shares[1:]) > 0.9 / TENANTS, shares


def test_a_lone_tenant_has_all():
    """Shares hold nobody back while nobody else waits."""
    world = World(Fake(), max_sequences=16)
    said = world.ask([3] * 20, greedy(40, n=16))
    world.step(4)
    assert said.request.generated > 16, "not all choices run at once"


def test_further_choices_wait_as_requests_of_their_tenant_do():
    """With two sequences at once, another tenant comes between the first choice and the others, which no policy sees."""
    world = World(Fake(), max_sequences=2)
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
    world = World(Fake(), max_sequences=8)
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
    world = World(Fake(), step_tokens=16)
    long = world.ask([3] * 300, greedy(3))
    world.step(2)
    short = world.ask([4] * 6, greedy(3), tenant=1)
    world.step(2)
    assert short.request.generated and not long.request.generated
    world.run()
    assert all(world.assert_right(said) for said in world.said)
