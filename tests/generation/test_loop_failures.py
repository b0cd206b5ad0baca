"""The loop when something fails: steps, copies and adapters, and deadlines, cancellations and the end of the server."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from hplm.errors import Broken, DeadlineMissed, Draining, Internal, InvalidInput, OutOfCapacity
from hplm.generation import loop
from hplm.generation.promise import Promise
from hplm.generation.sampling import Sampling
from tests.generation.small import KINDS, MS, Generating, Small, decode, same_as_reference
from tests.support.message import mentioning, mentions


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


def test_a_cancelled_request_ends_before_the_next_step(small):
    generating = Generating(small, seats=1)
    runs = generating.ask(range(3, 9), Sampling(max_tokens=300, ignore_eos=True))
    waits = generating.ask(range(3, 9), Sampling(max_tokens=300, n=2))
    other = generating.ask(range(3, 9), Sampling(max_tokens=5))
    for _ in range(5):
        generating.loop.step()
    said = runs.text()
    runs.request.cancel()
    waits.request.cancel()
    generating.line.wake()
    generating.loop.step()
    assert runs.ended and runs.finish() == "cancelled" and runs.text() == said
    assert waits.ended and [waits.finish(choice) for choice in (0, 1)] == ["cancelled"] * 2
    generating.run()
    assert other.error is None


def test_a_deadline_on_the_way_ends_with_what_there_is(small):
    generating = Generating(small)
    said = generating.ask(range(3, 9), Sampling(max_tokens=300, ignore_eos=True, n=2), promise=Promise(whole_ns=20 * MS))
    generating.run()
    assert [said.finish(choice) for choice in (0, 1)] == ["deadline"] * 2
    assert 5 < len(said.ids()) < 40 and said.text() == decode(said.ids())


@pytest.mark.parametrize("promise", [Promise(whole_ns=20 * MS), Promise(first_token_ns=20 * MS)])
def test_a_deadline_in_the_line_is_an_error(small, promise):
    generating = Generating(small, seats=1)
    generating.ask(range(3, 9), Sampling(max_tokens=100, ignore_eos=True))
    late = generating.ask(range(3, 9), Sampling(), promise=promise)
    generating.run()
    assert isinstance(late.error, DeadlineMissed) and not late.pieces


def test_what_needs_more_memory_than_there_is_is_refused(small):
    generating = Generating(small, tokens=128)
    generating.ask(range(3, 30), Sampling(max_tokens=100))
    with pytest.raises(InvalidInput, match=mentioning(28, 101, 129, 128)):
        generating.ask(range(3, 30), Sampling(max_tokens=101))
    generating.run()


def test_logits_that_are_no_numbers_are_an_error_of_their_request_alone(small):
    generating = Generating(small)
    good, bad = (generating.ask(range(3, 9), Sampling(max_tokens=20, ignore_eos=True), tenant) for tenant in (0, 1))
    run = generating.loop._decoder.run

    def poisoned(step):
        logits = run(step)
        for row, one in enumerate(one for one in step.planned if one.completes):
            if one.sequence.request is bad.request:
                logits[row] = torch.nan
        return logits

    generating.loop._decoder.run = poisoned
    generating.run()
    assert isinstance(bad.error, Broken) and mentions(bad.error, bad.request.source.tenant)
    assert good.error is None and len(good.ids()) == 20


def test_a_step_that_fails_ends_its_requests_and_no_other(small):
    generating = Generating(small)
    first = generating.ask(range(3, 9), Sampling(max_tokens=20))
    run = generating.loop._decoder.run

    def failing(step):
        generating.loop._decoder.run = run
        raise RuntimeError("the device is gone")

    generating.loop._decoder.run = failing
    generating.loop.step()
    second = generating.ask(range(3, 9), Sampling(max_tokens=20))
    generating.run()
    assert isinstance(first.error, Internal) and second.error is None
    assert "gone" not in str(first.error), "the message of an unexpected error is for the log alone"


NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch's words on a CPU


@pytest.mark.parametrize("failing", ["computing", "choosing"])
def test_a_step_that_the_device_has_no_memory_for_is_computed_in_halves(small, monkeypatch, failing):
    """Down to single tokens, if need be. All answers are as ever."""
    generating, sizes = Generating(small), []
    run, choosing = generating.loop._decoder.run, loop.choose

    def limited(function, size, most):
        sizes.append(size)
        if size > most:
            raise RuntimeError(NO_MEMORY)
        return function()

    if failing == "computing":
        generating.loop._decoder.run = lambda step: limited(partial(run, step), len(step.sums), 1)
    else:
        monkeypatch.setattr(loop, "choose", lambda *rows: limited(partial(choosing, *rows), len(rows[1]), 1))
    sampling = Sampling(temperature=0, max_tokens=6, ignore_eos=True)
    asked = [generating.ask(range(3, 9 + i), sampling, tenant) for i, tenant in enumerate((0, 2, 3))]
    generating.run()
    assert max(sizes) > 1 and all(said.error is None for said in asked)
    assert sum(same_as_reference(small, said) for said in asked) > 12


def test_what_the_device_has_no_memory_for_even_alone_is_an_error_of_its_request(small):
    generating = Generating(small)
    run, sampling = generating.loop._decoder.run, Sampling(max_tokens=6, ignore_eos=True)
    one, large, other = (generating.ask([3, 4, 5 + i], sampling) for i in range(3))

    def limited(step):
        if any(planned.sequence.request is large.request for planned in step.planned):
            raise RuntimeError(NO_MEMORY)
        return run(step)

    generating.loop._decoder.run = limited
    generating.run()
    assert (
        isinstance(large.error, OutOfCapacity) and mentions(large.error, "cache_tokens") and NO_MEMORY not in str(large.error)
    )
    assert not generating.loop.device_failed
    for said in (one, other):
        assert said.error is None and len(said.ids()) == 6


@pytest.mark.parametrize("fails", [False, True])
def test_slots_and_rooms_are_free_only_when_the_device_has_computed(small, fails):
    """After a step that failed, or that gave no token, nothing else has waited for the device."""
    generating, order = Generating(small, step_tokens=16), []
    decoder, stager, running = generating.loop._decoder, generating.stager, generating.loop.running
    run, release, end = decoder.run, stager.release, running.end

    def computing(step):
        order.append("run")
        return run(step) if not fails else 1 / 0

    decoder.run, decoder.wait = computing, lambda: order.append("wait")
    stager.release = lambda sequence: (order.append("release"), release(sequence))
    running.end = lambda sequence: (order.append("end"), end(sequence))
    said = generating.ask(range(3, 33), Sampling(max_tokens=6), tenant=2)
    generating.loop.step()
    assert not said.pieces and order[:2] == ["run", "wait"]
    said.request.cancel()
    generating.loop.step()
    assert said.ended and order == ["run", "wait", "release", "end"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_fails_is_an_error_of_its_request_alone_and_keeps_no_room(small, kind):
    generating = Generating(small, seats=4, kind=kind)
    cache, sampling = generating.loop.running.cache, Sampling(max_tokens=30, ignore_eos=True)
    copy = cache.copy
    first = generating.ask(range(3, 23), sampling)
    for _ in range(2):
        generating.loop.step()

    def failing(*rooms):
        cache.copy = copy
        raise RuntimeError("out of memory")

    cache.copy = failing
    like, other = (generating.ask([*range(3, 23), more], sampling) for more in (30, 31))
    generating.loop.step()
    assert isinstance(like.error, Internal) and cache.copy is copy and "out of memory" not in str(like.error)
    generating.run()
    for said in (first, other):
        assert said.error is None and same_as_reference(small, said) > 10


def test_a_copy_for_a_further_answer_that_fails_is_an_error_of_its_request_alone(small):
    generating = Generating(small, seats=8)
    cache, sampling = generating.loop.running.cache, Sampling(max_tokens=30, ignore_eos=True)
    copy, copies = cache.copy, []

    def failing(*rooms):
        copies.append(rooms)
        if len(copies) == 2:  # one further answer runs, one is to start, and one waits behind it
            raise RuntimeError("out of memory")
        copy(*rooms)

    other = generating.ask([5, 6], sampling)
    cache.copy = failing
    several = generating.ask(range(3, 23), replace(sampling, n=4))
    generating.run()
    assert isinstance(several.error, Internal) and len(copies) == 2
    assert other.error is None and len(other.ids()) == 30


def test_adapters_whose_copy_failed_are_copied_for_the_next_request(small):
    generating = Generating(small)
    sampling, tenant = Sampling(max_tokens=20, ignore_eos=True), 2
    first = generating.ask(range(3, 9), sampling, tenant)
    hold, fills = generating.stager.hold, []

    def holding(sequence):
        hold(sequence)
        (slots,) = generating.stager.slots().values()
        fill = slots.fill

        def failing():
            fills.append(fill)
            slots.fill = fill
            raise RuntimeError("the device is busy")

        if not fills:
            slots.fill = failing

    generating.stager.hold = holding
    generating.loop.step()
    assert isinstance(first.error, Internal) and len(fills) == 1 and "busy" not in str(first.error)
    second = generating.ask(range(3, 9), sampling, tenant)
    generating.run()
    assert second.error is None and same_as_reference(small, second) == 20


def test_slots_are_freed_of_layouts_that_no_tenant_has_any_more(small):
    """When another layout needs memory, and no sequence holds one of them."""
    generating, sampling = Generating(small), Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    one, other = (small.sources[tenant].adapter[1].layout for tenant in (2, 3))

    def asked(*tenants):
        said = [generating.ask(range(3, 9), sampling, tenant) for tenant in tenants]
        generating.run()
        assert all(same_as_reference(small, own) > 3 for own in said)
        return generating.stager.slots().keys()

    assert asked(2) == {one}
    generating.layouts = {other}
    assert asked(3) == {other}
    assert asked(3, 2) == {one, other}, "a request of an older snapshot has its adapter, and takes it from nobody"
    generating.layouts = {one, other}
    assert asked(2) == {one, other}


def test_a_broken_adapter_is_an_error_of_its_tenant_alone(small):
    record, bank = small.sources[2].adapter
    broken = replace(small.sources[2], adapter=(replace(record, version=9), bank))
    small.sources.append(broken)
    try:
        generating = Generating(small)
        good = generating.ask(range(3, 9), Sampling(max_tokens=5), tenant=2)
        bad = generating.ask(range(3, 9), Sampling(max_tokens=5), tenant=len(small.sources) - 1)
        generating.run()
    finally:
        small.sources.pop()
    assert isinstance(bad.error, Broken) and good.error is None


def test_an_end_of_the_server_ends_all(small):
    generating = Generating(small, seats=2)
    asked = [generating.ask(range(3, 9), Sampling(max_tokens=50, n=1 + i % 2)) for i in range(6)]
    for _ in range(4):
        generating.loop.step()
    generating.line.close()
    with pytest.raises(Draining):
        generating.ask([3], Sampling())
    generating.loop.abandon()
    assert all(isinstance(said.error, Draining) for said in asked)
    generating.run()
