"""The threads: requests from many others, cancelled or not, each get their pieces in order and one end."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hplm.errors import DeadlineMissed, Draining, HplmError, Internal, InvalidInput, QueueFull
from hplm.generation import generator as module
from hplm.generation.generator import Generator
from hplm.generation.promise import Promise
from hplm.generation.sampling import Sampling
from hplm.scheduling.limits import Limits
from tests.generation.fake import Fake
from tests.generation.world import START, Said, World, greedy
from tests.support.wait import PATIENCE, Hold, eventually


class Served:
    """A generator, and requests whose ends can be waited for."""

    def __init__(self, **settings):
        self.world = World(Fake(), **settings)
        self.generator = Generator(self.world.line, lambda say: self.world.loop_of(say, time.monotonic_ns), Limits(1000, 5000))
        self.read = []  # tenants whose prompts were read, in order

    def ask(self, prompt, sampling, tenant=0, before=lambda: None, reading=lambda: None, size=0, **more):
        """`before` is called before each piece is taken, `reading` when its prompt is read."""
        said = Said()
        respond = lambda piece: (before(), said(piece))  # noqa: E731
        said.request = self.world.request([], sampling, respond, tenant, time.monotonic_ns(), **more)

        def read():
            self.read.append(tenant)
            reading()
            ids = [START, *prompt]
            said.request.read(ids, self.world.model.addresses(said.request.source, ids), "")

        self.generator.submit(said.request, read, size or len(prompt))
        return said

    @property
    def works(self):
        try:
            self.generator.check()
        except Internal:
            return False
        return True


@pytest.fixture
def served():
    served = Served()
    yield served
    served.generator.close(PATIENCE)
    with pytest.raises(Draining):
        served.ask([3], Sampling())


def test_requests_of_many_threads_get_all_their_pieces_and_one_end():
    served = Served(tokens=256, seats=6, limit=10_000)

    def client(number):
        chance, asked = random.Random(number), []
        for _ in range(6):
            sampling = Sampling(max_tokens=chance.randrange(1, 20), n=chance.choice([1, 1, 2]))
            asked.append(served.ask([3 + number] * chance.randrange(20), sampling, number % 4))
            if chance.random() < 0.3:
                served.generator.cancel(asked[-1].request)
            if chance.random() < 0.5:
                asked[-1].wait()
        return asked

    with ThreadPoolExecutor(8) as pool:
        asked = [said for own in pool.map(client, range(8)) for said in own]
    for said in asked:
        assert said.wait().error is None
        counts = [piece.generated_tokens for piece in said.pieces]
        assert counts == sorted(counts)
        served.world.assert_right(said)
    served.generator.close(PATIENCE)
    assert served.world.running.free == served.world.cache.space.tokens and not served.world.held


def test_a_reader_that_fails_is_cancelled_and_harms_no_other(served):
    bad = served.ask([3], greedy(300), before=lambda: 1 / 0)
    good = served.ask([4], greedy(20))
    assert len(good.wait().ids()) == 20
    eventually(lambda: bad.request.ended)
    assert bad.request.cancelled


def test_closing_answers_everybody():
    served = Served(seats=1)
    with Hold() as hold:
        asked = [served.ask([3], greedy(400), before=hold.pass_through) for _ in range(5)]
        hold.until_reached()
        closing = threading.Thread(target=served.generator.close, args=(0.05,))
        closing.start()
        eventually(lambda: served.world.line.closed)
    closing.join(PATIENCE)
    assert all(said.wait().error is None or isinstance(said.error, Draining) for said in asked)


def test_what_is_refused_when_it_was_read_gets_one_end(served):
    assert isinstance(served.ask([3], Sampling(max_tokens=1000)).wait().error, InvalidInput)
    failed = served.ask([3], greedy(3), reading=lambda: 1 / 0).wait()
    assert isinstance(failed.error, Internal) and "division" not in str(failed.error)
    assert served.ask([3], greedy(3)).wait().error is None


def test_tenants_take_turns_at_having_their_prompts_read(served):
    """While one is read, all can be taken, and steps go on."""
    with Hold() as hold:
        grows = served.ask([3], greedy(400))
        first = served.ask([3], greedy(3), reading=hold.pass_through)
        hold.until_reached()
        many = [served.ask([3] * 100, greedy(3), 1) for _ in range(20)]
        other = served.ask([3], greedy(3), 2)
        grows.wait()
        assert not first.pieces and served.generator.waiting >= 21
    assert all(said.wait().error is None for said in (first, other, *many))
    assert served.read.index(2) <= served.read.index(1) + 1


@pytest.mark.parametrize("way", ["cancelled", "late", "displaced", "closed"])
def test_a_request_whose_prompt_was_not_read_gets_one_end(way):
    served = Served()
    with Hold() as hold:
        read = [served.ask([3], greedy(3), reading=hold.pass_through)]
        hold.until_reached()
        waits = served.ask([3], greedy(3, n=2), 1, size=3000, promise=Promise(1 if way == "late" else 0))
        if way == "cancelled":
            served.generator.cancel(waits.request)
        elif way == "displaced":
            read += [served.ask([3], greedy(3), tenant, size=1500) for tenant in (2, 3)]
            assert isinstance(waits.wait().error, QueueFull)
            with pytest.raises(QueueFull):
                served.ask([3], greedy(3), 1, size=4000)
        elif way == "closed":
            closing = threading.Thread(target=served.generator.close, args=(0.05,))
            closing.start()
            eventually(lambda: served.world.line.closed)
    waits.wait()
    if way == "cancelled":
        assert [waits.finish(choice) for choice in range(2)] == ["cancelled"] * 2
    else:
        assert isinstance(waits.error, {"late": DeadlineMissed, "displaced": QueueFull, "closed": Draining}[way])
    assert all(said.wait().error is None or way == "closed" for said in read)
    served.generator.close(PATIENCE)
    assert 1 not in served.read, "nobody needs its prompt"


def test_failures_of_the_loop_with_steps_between_them_fail_no_check(served, monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0)
    monkeypatch.setattr(module, "MOST_FAILURES", 2)
    expired, calls = served.world.line.expired, []

    def failing(now):
        served.generator.check()  # a second failure in a row would fail the check, and so the next step
        calls.append(now)
        if len(calls) % 2:
            raise HplmError("every other time")
        return expired(now)

    served.world.line.expired = failing
    assert served.ask([3], greedy(20)).wait().error is None and served.works
    served.world.line.expired = expired  # a generator that closes fails its check


def test_a_loop_that_always_fails_fails_the_check_and_still_closes(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.001)
    served = Served()
    assert served.works
    served.world.line.expired = lambda now: 1 / 0
    said = served.ask([3], greedy(3))
    eventually(lambda: not served.works)
    served.generator.close(0.05)
    assert isinstance(said.wait().error, Draining)


@pytest.mark.parametrize(("fault", "works"), [("device", False), ("stage", True)])
def test_a_device_that_fails_for_good_fails_the_check(served, fault, works):
    served.world.fault = fault
    assert isinstance(served.ask([3], greedy(3)).wait().error, Internal)
    assert served.works == works


@pytest.mark.parametrize("place", ["a step", "a reader"])
def test_what_hangs_fails_the_check_until_it_gets_on(served, monkeypatch, place):
    expired = served.world.line.expired
    with Hold() as hold:
        if place == "a step":
            served.world.line.expired = lambda now: (hold.pass_through(), expired(now))[1]
        said = served.ask([3], greedy(3), before=hold.pass_through if place == "a reader" else lambda: None)
        hold.until_reached()
        assert served.works
        monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
        eventually(lambda: not served.works)
    assert said.wait().error is None
    eventually(lambda: served.works)
