"""A decoder with its threads: requests from many others, cancelled or not, each get their pieces in order and one end."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hplm.errors import DeadlineMissed, Draining, Internal, InvalidInput, QueueFull
from hplm.generation.reader import PromptReader
from hplm.generation.sampling import Sampling
from hplm.process.driver import Driver
from hplm.scheduling.limits import Limits
from tests.generation.fake import START, Fake
from tests.generation.world import Said, World, greedy
from tests.support.wait import PATIENCE, Hold, eventually


class Served:
    """A loop and a reader with their threads, and requests whose ends can be waited for."""

    def __init__(self, limits=Limits(1000, 5000), help_at_once=False, **settings):  # noqa: B008
        """`limits`: how many prompts, and bytes of them, may wait to be read."""
        self.world = World(Fake(), clock=time.monotonic_ns, **settings)
        self.loop = self.world.loop
        self.reader = PromptReader(self.loop, limits)
        self.read = []  # tenants whose prompts were read, in order
        self.driver = Driver(self.reader, help_at_once=help_at_once)
        self.reader.wake = self.driver.wake

    def ask(self, prompt, sampling, tenant=0, before=lambda: None, reading=lambda: None, size=0, at_once=False, **more):
        """`before` is called before each piece is taken, `reading` when its prompt is read."""
        said = Said()
        respond = lambda piece: (before(), said(piece))  # noqa: E731

        def read(request):
            self.read.append(tenant)
            reading()
            request.prompt = [START, *prompt]

        unread = {"read": read, "unread_bytes": size or len(prompt)}
        said.request = self.world.request([], sampling, respond, tenant, time.monotonic_ns(), **unread, **more)
        self.reader.submit(said.request, at_once)
        if at_once:
            self.driver.wake()
        return said

    def hold_steps(self, hold):
        machine = self.world.decoder
        run = machine.run
        machine.run = lambda step: (hold.pass_through(), run(step))[1]

    def cancel(self, said):
        self.loop.cancel(said.request)
        self.driver.wake()

    def end(self, drain_s=3600):
        """Nothing takes so long to drain, and it does not end if nobody says that all has drained."""
        self.driver.close(drain_s)
        self.reader.join()
        self.driver.join()


@pytest.fixture
def served():
    served = Served()
    yield served
    served.end()
    with pytest.raises(Draining):
        served.ask([3], Sampling())


@pytest.mark.parametrize("help_at_once", [False, True])
def test_requests_of_many_threads_get_all_their_pieces_and_one_end(help_at_once):
    """Also if another thread takes in, expires and starts beside each step."""
    served = Served(help_at_once=help_at_once, tokens=256, max_sequences=6, limit=10_000)

    def client(number):
        chance, asked = random.Random(number), []
        for _ in range(6):
            sampling = Sampling(max_tokens=chance.randrange(1, 20), n=chance.choice([1, 1, 2]))
            prompt = [3 + number] * chance.randrange(20)
            asked.append(served.ask(prompt, sampling, number % 4, at_once=chance.random() < 0.5))
            if chance.random() < 0.3:
                served.cancel(asked[-1])
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
    served.end()
    assert served.world.running.free == served.world.cache.tokens and not served.world.held


def test_a_client_that_cannot_be_told_is_cancelled_and_harms_no_other(served):
    bad = served.ask([3], greedy(300), before=lambda: 1 / 0)
    good = served.ask([4], greedy(20))
    assert len(good.wait().ids()) == 20
    eventually(lambda: bad.request.ended)
    assert bad.request.cancelled


def test_what_is_abandoned_during_a_step_is_told_at_once_and_freed_after_it():
    served = Served()
    with Hold() as hold:
        served.hold_steps(hold)
        said = served.ask([3], greedy(400))
        hold.until_reached()
        served.loop.abandon()
        assert isinstance(said.wait().error, Draining) and len(served.world.running)
    eventually(lambda: not len(served.world.running))
    assert served.world.running.free == served.world.cache.tokens
    served.end()


def test_what_is_refused_when_it_was_read_gets_one_end(served):
    assert isinstance(served.ask([3], Sampling(max_tokens=1000)).wait().error, InvalidInput)
    failed = served.ask([3], greedy(3), reading=lambda: 1 / 0).wait()
    assert isinstance(failed.error, Internal) and "division" not in str(failed.error)
    assert served.ask([3], greedy(3)).wait().error is None


@pytest.mark.parametrize(("size", "waits", "here"), [(10, False, True), (10_000, False, False), (10, True, False)])
def test_only_a_short_prompt_that_nobody_waits_before_is_read_at_once(size, waits, here):
    served, readers = Served(Limits(10, 10**6)), []
    with Hold() as hold:
        first = [served.ask([3], greedy(1), reading=hold.pass_through)] if waits else []
        if waits:
            hold.until_reached()
        said = served.ask(
            [3], greedy(1), 1, reading=lambda: readers.append(threading.current_thread()), size=size, at_once=True
        )
    said.wait()
    assert (readers == [threading.main_thread()]) == here
    assert all(own.wait().error is None for own in first)
    served.end()


def test_tenants_take_turns_at_having_their_prompts_read(served):
    """While one is read, all can be taken, and steps go on."""
    with Hold() as hold:
        grows = served.ask([3], greedy(400))
        first = served.ask([3], greedy(3), reading=hold.pass_through)
        hold.until_reached()
        many = [served.ask([3] * 100, greedy(3), 1) for _ in range(20)]
        other = served.ask([3], greedy(3), 2)
        grows.wait()
        assert not first.pieces and len(served.reader) >= 21 and served.reader.busy_since()
    assert all(said.wait().error is None for said in (first, other, *many))
    assert served.read.index(2) <= served.read.index(1) + 1


@pytest.mark.parametrize("way", ["cancelled", "late", "displaced"])
def test_a_request_whose_prompt_was_not_read_gets_one_end(served, way):
    with Hold() as hold:
        read = [served.ask([3], greedy(3), reading=hold.pass_through)]
        hold.until_reached()
        waits = served.ask([3], greedy(3, n=2), 1, size=3000, allowed_ns=int(way == "late"))
        if way == "cancelled":
            served.cancel(waits)
        elif way == "displaced":
            read += [served.ask([3], greedy(3), tenant, size=1500) for tenant in (2, 3)]
            assert isinstance(waits.wait().error, QueueFull)
            with pytest.raises(QueueFull):
                served.ask([3], greedy(3), 1, size=4000)
    waits.wait()
    if way == "cancelled":
        assert [waits.finish(choice) for choice in range(2)] == ["cancelled"] * 2
    else:
        assert isinstance(waits.error, {"late": DeadlineMissed, "displaced": QueueFull}[way])
    assert all(said.wait().error is None for said in read) and 1 not in served.read, "nobody needs its prompt"


def test_closing_answers_who_runs_who_waits_and_whose_prompt_is_read():
    served = Served(max_sequences=1)
    with Hold() as steps, Hold() as reading:
        served.hold_steps(steps)
        asked = [served.ask([3], greedy(400)) for _ in range(5)]
        steps.until_reached()
        asked += [served.ask([3], greedy(3), reading=reading.pass_through), served.ask([3], greedy(3), 1, size=3000)]
        reading.until_reached()
        closing = threading.Thread(target=served.end, args=[0.05])
        closing.start()
        eventually(lambda: served.loop.queue.draining)
    closing.join(PATIENCE)
    assert all(said.wait().error is None or isinstance(said.error, Draining) for said in asked)
    assert isinstance(asked[-1].error, Draining)
