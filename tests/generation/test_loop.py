"""The loop: rules that random runs do not reach."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from hplm.adapters.layout import Layout
from hplm.errors import Broken, DeadlineMissed, HplmError, Internal
from hplm.generation import staging
from hplm.generation.loop import MOST_FAILURES
from hplm.generation.request import CANCELLED, DecoderRequest
from hplm.plot.forest import Forest
from tests.generation.fake import Fake
from tests.generation.small import Small
from tests.generation.world import Said, World, decode, greedy

ALIKE = list(range(3, 37))  # with the start, two blocks of 16 and three more tokens


def test_attention_of_a_step_with_a_seed_must_not_depend_on_neighbours(small, monkeypatch):
    """Only a GPU's kernel makes a difference."""
    asked = []
    attention = staging.attention_over
    monkeypatch.setattr(staging, "attention_over", lambda *given: asked.append(given[-1]) or attention(*given))
    world = World(small)
    world.ask([3, 4], greedy(4))
    world.ask([3, 4], greedy(2, seed=7))
    world.run()
    assert asked == [True] * 2 + [False] * 2


def test_an_adapter_that_cannot_be_copied_or_read_fails_its_requests_alone(small):
    """The next request copies what this one did not. The stager is real: random runs have a fake one."""
    model, faults = copy(small), [ZeroDivisionError]

    def read(record, into):
        if faults:
            raise faults.pop()
        small.backbone.records.read(record, into)

    model.backbone, good = copy(small.backbone), small.pinned[2]
    model.backbone.records = SimpleNamespace(read=read)
    model.pinned = [good, replace(good, adapter=replace(good.adapter, checksum=9))]
    world = World(model)
    first = world.ask([3, 4], greedy(20))
    world.step()
    assert isinstance(first.error, Internal)
    bad, again = (world.ask([3, 4], greedy(20), tenant) for tenant in (1, 0))
    world.run()
    assert isinstance(bad.error, Broken) and again.error is None and world.assert_right(again) > 5


def test_a_damaged_row_fails_the_requests_that_read_it_alone(tmp_path):
    small = Small(tmp_path)
    world = World(small)
    bad, good = (world.ask([token, 4], greedy(3), tenant) for token, tenant in ((7, 0), (9, 1)))
    ((table, _),) = small.pinned[0].chain.links
    with open(table.folder / "values", "r+b") as values:
        row = table.index.find(table.space.of(np.array(bad.request.prompt), np.array([3])))[1]
        values.seek(int(row) * table.meta.row_bytes)
        values.write(b"\xff" * 4)
    world.run()
    assert isinstance(bad.error, Broken) and "checksum" in str(bad.error)
    assert good.error is None and world.assert_right(good) == 3


def test_slots_are_freed_of_layouts_that_no_tenant_has_any_more(small):
    """When another layout needs memory, and no sequence holds one of them."""
    world = World(small)
    one, other = (Layout.of(small.pinned[tenant].adapter.layout) for tenant in (2, 3))

    def asked(layouts, *tenants):
        small.layouts = layouts
        said = [world.ask([3, 4], greedy(8), tenant) for tenant in tenants]
        world.run()
        assert all(world.assert_right(own) > 3 for own in said)
        return world.stager.slots().keys()

    known = small.layouts
    assert asked(known, 2) == {one}
    assert asked({other}, 3) == {other}
    assert asked({other}, 3, 2) == {one, other}, "a request of an older snapshot has its adapter, and takes it from nobody"
    assert asked(known, 2) == {one, other}


def test_a_new_snapshot_of_the_same_tables_ends_no_sharing(small):
    """A change of any tenant makes a new forest, with other chains over the same tables."""
    before, forest = small.pinned[0], small.forest
    newer = replace(before, chain=Forest([], forest.branches, before=forest).chain("root", 1))
    assert newer.key == before.key
    assert len({before.key, *(replace(before, **own).key for own in ({"version": 2}, {"uid": 9}))}) == 3
    assert replace(before, chain=small.pinned[1].chain).key != before.key, "it has one more table"


def test_a_tenants_tokens_are_computed_once_and_nobody_elses_are_used():
    """All answers to a prompt, one that begins alike, and the next turn of a conversation share what their tenant has."""
    model = Fake()
    world, count = World(model), len(ALIKE) + 1
    expected = world.prompt_tokens

    def asked(prompt, tenant, new, n=1):
        """Asks until the first token, and says how many tokens must have been computed."""
        nonlocal expected
        said = world.ask(prompt, greedy(12, n=n), tenant)
        world.step(3)
        expected += new
        assert world.prompt_tokens == expected
        return said

    first = asked(ALIKE, 0, count, n=3)
    every = [sequence.blocks for sequence in world.running.sequences]
    assert len({own[:2] for own in every}) == 1 and len({block for own in every for block in own}) == 2 + 3  # the last: its own
    asked([*ALIKE, *range(3, 13)], 0, 10)
    asked(ALIKE, 1, count)
    world.run()
    more = [*ALIKE, *first.ids(2), *range(5, 12)]
    asked(more, 0, 7 + 1)  # the last token of an answer was never computed
    asked(more, 1, len(more) - len(ALIKE))
    model.change(0)
    asked(more, 0, len(more) + 1)
    world.run()
    assert all(world.assert_right(said) for said in world.said)


def test_what_is_remembered_takes_no_room_from_others():
    """A sequence that needs the whole cache gets it. None is put back for what is only remembered."""
    world = World(Fake(), tokens=128)
    for i in range(8):
        world.ask([3 + i] * 20, greedy(10))
        world.run()
    assert world.cache.free < 128 == world.running.free == world.running.capacity.tokens
    whole = world.ask(ALIKE, greedy(90))
    world.run()
    assert not world.running.put_back and world.assert_right(whole) == 90


def test_a_request_that_is_cancelled_before_its_prompt_is_read_never_starts():
    """Another thread may offer it after a step has looked for those that were cancelled."""
    world, said = World(Fake()), Said()
    said.request = DecoderRequest(world.model.pinned[0], [], greedy(3, n=2), said, decode, arrival_ns=1, seed=0)
    world.cancel(said)
    world.loop.expire()
    world.loop.enqueue(said.request)
    other = world.ask([3], greedy(2))
    assert world.loop.prepare() is not None
    assert [said.finish(choice) for choice in range(2)] == [CANCELLED] * 2
    assert [one.request for one in world.running.sequences] == [other.request]


@pytest.mark.parametrize("what", ["plan", "expired"])
def test_the_engine_ends_if_many_steps_in_a_row_fail(what):
    """Not if others succeed between them."""
    world = World(Fake())
    owner = world.running if what == "plan" else world.queue
    world.ask([3], greedy(9))
    for fails, ends in ((MOST_FAILURES - 1, 0), (MOST_FAILURES - 1, 0), (MOST_FAILURES, 1)):
        late = world.ask([3], greedy(1), allowed_ns=1)
        with patch.object(owner, what, side_effect=HplmError("a bug")):
            for _ in range(fails):
                with pytest.raises(HplmError, match="a bug"):
                    world.loop.step()
        assert world.ended == ends
        world.step()
        assert isinstance(late.error, DeadlineMissed)
