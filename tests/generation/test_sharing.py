"""Sequences that begin alike share what was computed: of one tenant version only, and without taking room from others."""

from dataclasses import replace

import pytest

from hplm.errors import Internal
from hplm.generation.request import Sequence
from hplm.generation.running import FINISHED
from hplm.generation.sampling import Sampling
from hplm.options import PAGED
from hplm.plot.forest import Forest
from tests.generation.small import KINDS, Generating, Small, same_as_reference


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_computed_once_for_all_its_answers(small, kind):
    generating = Generating(small, kind=kind)
    prompt = list(range(3, 33))
    said = generating.ask(prompt, Sampling(n=4, max_tokens=8, ignore_eos=True, seed=1))
    generating.run()
    assert len({tuple(said.ids(choice)) for choice in range(4)}) == 4
    assert generating.loop.counts.prompt_tokens == len(prompt) + 1
    assert sum(same_as_reference(small, said, choice) for choice in range(4)) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_not_computed_again_for_the_same_tenant_only(small, kind):
    prompt = list(range(3, 33))
    for tenant, computed in ((2, 31 + 10), (4, 31 + 41)):
        generating = Generating(small, kind=kind)
        first = generating.ask(prompt, Sampling(temperature=0, max_tokens=30, ignore_eos=True), tenant=2)
        generating.loop.step()
        second = generating.ask([*prompt, *range(3, 13)], Sampling(temperature=0, max_tokens=10), tenant=tenant)
        generating.run()
        assert generating.loop.counts.prompt_tokens == computed
        assert same_as_reference(small, first) + same_as_reference(small, second) > 20


def test_answers_share_the_blocks_of_their_prompt(small):
    """Four answers to a prompt of three blocks: each has its own last block, and the first two belong to all."""
    generating = Generating(small, kind=PAGED, tokens=256)
    said = generating.ask(range(3, 37), Sampling(n=4, max_tokens=8, ignore_eos=True, seed=1))
    for _ in range(3):
        generating.loop.step()
    rooms = [sequence.room for sequence in generating.loop.running.sequences]
    assert len(rooms) == 4 and len({room.starts[:2] for room in rooms}) == 1
    assert len({start for room in rooms for start in room.starts}) == 2 + 4
    assert generating.space.free == 256 - 16 * (2 + 4)
    generating.run()
    assert sum(same_as_reference(small, said, choice) for choice in range(4)) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_shared_between_tenants_or_versions(small, kind):
    """Sequences with the same prompt share computed tokens if their tenant is the same, in the same version."""
    newer = replace(small.sources[2], version=2)
    small.sources.append(newer)
    try:
        generating = Generating(small, kind=kind)
        asked = []
        for tenant in (2, 3, 4, len(small.sources) - 1, 2):
            sampling = Sampling(temperature=0, max_tokens=20, ignore_eos=True)
            asked.append(generating.ask(range(3, 37), sampling, tenant))
            generating.loop.step()
    finally:
        small.sources.pop()
    first, *others, again = generating.loop.running.sequences
    rooms = {sequence.request.source.key: {*sequence.room.starts} for sequence in (first, *others)}
    assert len(rooms) == 4 and len(set.union(*rooms.values())) == sum(map(len, rooms.values()))
    assert len({*again.room.starts} & {*first.room.starts}) == (2 if kind == PAGED else 0)
    assert generating.loop.counts.prompt_tokens == 4 * 35
    generating.run()
    assert all(same_as_reference(small, said) for said in asked)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_finished_sequence_has_computed_serves_the_next_one_of_its_tenant_version(small, kind):
    """A second turn of a conversation computes only what is new in it. Other tenants and versions compute all."""
    small.sources.append(replace(small.sources[2], version=2))
    try:
        generating = Generating(small, kind=kind)
        greedy = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
        first = generating.ask(range(3, 37), greedy, tenant=2)
        while not first.ended:
            generating.loop.step()
        more = [*range(3, 37), *first.ids(), *range(5, 12)]
        asked, computed = [first], [35]
        for tenant, new in ((2, 7 + 1), (3, 54), (len(small.sources) - 1, 54)):  # the last token was never computed
            asked.append(generating.ask(more, greedy, tenant))
            while not asked[-1].ended:
                generating.loop.step()
            computed.append(computed[-1] + new)
            assert generating.loop.counts.prompt_tokens == computed[-1]
    finally:
        small.sources.pop()
    generating.run()
    assert sum(same_as_reference(small, said) for said in asked) > 30


def test_a_new_snapshot_of_the_same_tables_ends_no_sharing(small):
    """A change of any tenant makes a new forest, with other chains over the same tables."""
    generating, greedy = Generating(small), Sampling(temperature=0, max_tokens=4, ignore_eos=True)
    forest, before = small.forest, small.sources[0]
    newer = replace(before, chain=Forest([], forest.branches, before=forest).chain("root", 1))
    other = replace(before, chain=small.sources[1].chain)  # it has one more table
    small.sources += [newer, other]
    try:
        for source in (before, newer, other):
            generating.ask(range(3, 36), greedy, small.sources.index(source))
            while generating.loop.step():
                pass
    finally:
        del small.sources[-2:]
    assert generating.loop.counts.prompt_tokens == 34 + 0 + 34


@pytest.mark.parametrize("kind", KINDS)
def test_a_remembered_sequence_takes_no_room_from_others(small, kind):
    """A sequence that needs the whole cache gets it. None is put back for what is only remembered."""
    generating = Generating(small, tokens=128, kind=kind)
    for i in range(8):
        generating.ask([3 + i] * 20, Sampling(temperature=0, max_tokens=10, ignore_eos=True))
        while len(generating.loop.running) or len(generating.line):
            generating.loop.step()
    running = generating.loop.running
    assert running._finished and generating.space.free < 128 == running.free == running.capacity().tokens + 64
    whole = generating.ask(range(3, 37), Sampling(temperature=0, max_tokens=90, ignore_eos=True))
    generating.loop.step()
    assert len(running) == 1
    generating.run()
    assert not running.put_back and same_as_reference(small, whole) > 40


def test_few_sequences_are_remembered_and_none_that_failed(small):
    generating = Generating(small, tokens=4096)
    for i in range(FINISHED + 5):
        generating.ask([3 + i], Sampling(max_tokens=2, ignore_eos=True))
        generating.loop.step()
        generating.loop.step()
    finished = generating.loop.running._finished
    assert [one.ids[1] for one in finished] == [3 + i for i in range(5, FINISHED + 5)]
    lost = generating.ask([9], Sampling(max_tokens=20))
    generating.loop._decoder.run = lambda step: 1 / 0
    generating.loop.step()
    assert isinstance(lost.error, Internal) and len(finished) == FINISHED and finished[-1].ids[1] == 3 + FINISHED + 4
    generating.run()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "most"), [(20, 60), (100, 1)], ids=["the rest is needed", "there is no room"])
def test_nothing_is_forgotten_for_a_sequence_that_does_not_start(small, kind, prompt, most):
    """It is tried again in each step, so the next turns of many conversations would be computed anew."""
    generating = Generating(small, tokens=128, kind=kind)
    for i in range(3):
        said = generating.ask([3 + i] * 20, Sampling(max_tokens=4, ignore_eos=True))
        while not said.ended:
            generating.loop.step()
    generating.ask([7] * 20, Sampling(max_tokens=40, ignore_eos=True))
    generating.loop.step()
    running, remembered = generating.loop.running, [*generating.loop.running._finished]
    assert len(running.sequences) == 1 and len(remembered) == 3 and not generating.space.free
    waits = Sequence(generating.ask([9] * prompt, Sampling(max_tokens=most)).request)
    assert not running.start(waits, share=1.0) and waits.room is None
    assert running._finished == remembered and not generating.space.free
    starts = Sequence(generating.ask([9] * 20, Sampling(max_tokens=8)).request)
    assert running.start(starts, share=1.0)
    assert running._finished == remembered[1:]
