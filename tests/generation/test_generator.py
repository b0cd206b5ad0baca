"""The loop in its thread: requests from many threads, cancelled or not, each get their pieces in order and one end."""

import random
import threading
import time

import numpy as np
import pytest

from hplm.errors import Draining, HplmError, Internal, InvalidInput
from hplm.generation import generator as module
from hplm.generation.generator import Generator
from hplm.generation.request import Request
from hplm.generation.sampling import Sampling
from tests.generation.small import START, Generating, Said, Small, decode
from tests.support.wait import PATIENCE, eventually


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


class Served:
    """A generator, and requests whose ends can be waited for."""

    def __init__(self, small, **settings):
        self.inner = Generating(small, **settings)
        self.inner.loop._now_ns = time.monotonic_ns

        def loop(say):
            self.inner.loop._say = say
            return self.inner.loop

        self.generator = Generator(self.inner.line, loop)

    def ask(self, prompt, sampling, tenant=0, seed=0, before=lambda: None):
        """`before` is called before each piece is taken."""
        source = self.inner.small.sources[tenant]
        ids = [START, *prompt]
        addresses = source.chain.lookup(np.array(ids), np.array([len(ids)])).addresses
        done = threading.Event()

        def respond(piece):
            before()
            said(piece)
            if said.ended:
                done.set()

        now, to = time.monotonic_ns(), respond
        request = Request(source, ids, addresses, sampling, to, decode, arrival_ns=now, seed=seed)
        said = Said(request)
        said.done = done
        self.generator.submit(request)
        return said


def test_requests_of_many_threads_get_all_their_pieces_and_one_end(small):
    served = Served(small, tokens=256, seats=6, limit=10_000)
    asked, failures = [], []

    def client(number):
        chance = random.Random(number)
        try:
            for _ in range(6):
                sampling = Sampling(max_tokens=chance.randrange(1, 20), n=chance.choice([1, 1, 2]), seed=number)
                said = served.ask([3 + number] * chance.randrange(20), sampling, number % 5)
                asked.append(said)
                if chance.random() < 0.3:
                    time.sleep(chance.random() * 0.02)
                    served.generator.cancel(said.request)
                if chance.random() < 0.5:
                    assert said.done.wait(PATIENCE)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for said in asked:
        assert said.done.wait(PATIENCE)
    served.generator.close(PATIENCE)
    assert not failures and len(asked) == 48
    for said in asked:
        assert said.error is None
        counts = [piece.generated_tokens for piece in said.pieces]
        assert counts == sorted(counts)
        for choice in range(said.request.sampling.n):
            assert said.finish(choice) in ("length", "stop", "cancelled")
    assert served.inner.loop.running.free == served.inner.space.tokens
    with pytest.raises(Draining):
        served.ask([3], Sampling())


def test_a_reader_that_fails_is_cancelled_and_harms_no_other(small):
    served = Served(small)

    def failing():
        raise RuntimeError("the connection is gone")

    bad = served.ask([3], Sampling(max_tokens=300, ignore_eos=True), before=failing)
    good = served.ask([4], Sampling(max_tokens=20, ignore_eos=True))
    assert good.done.wait(PATIENCE) and len(good.ids()) == 20
    eventually(lambda: bad.request.ended)
    assert bad.request.cancelled
    served.generator.close(PATIENCE)


def test_closing_answers_everybody(small):
    served = Served(small, seats=1)
    asked = [served.ask([3], Sampling(max_tokens=400, ignore_eos=True)) for _ in range(5)]
    served.generator.close(0.05)
    assert all(said.done.wait(PATIENCE) for said in asked)
    assert any(isinstance(said.error, Draining) for said in asked)


def test_what_is_refused_raises_and_gets_no_piece(small):
    served = Served(small, tokens=128)
    with pytest.raises(InvalidInput):
        served.ask([3], Sampling(max_tokens=1000))
    served.generator.close(PATIENCE)


def test_a_loop_that_fails_once_goes_on(small):
    served = Served(small)
    step, failed = served.inner.loop._drop, []

    def failing(now):
        if not failed:
            failed.append(True)
            raise HplmError("once")
        step(now)

    served.inner.loop._drop = failing
    said = served.ask([3], Sampling(max_tokens=3))
    assert said.done.wait(PATIENCE) and failed
    served.generator.close(PATIENCE)


def fails_a_check(generator):
    try:
        generator.check()
    except Internal:
        return True
    return False


def test_a_loop_that_always_fails_fails_the_check_and_still_closes(small, monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.001)
    served = Served(small)
    served.generator.check()

    def failing(now):
        raise HplmError("always")

    served.inner.loop._drop = failing
    said = served.ask([3], Sampling(max_tokens=3))
    eventually(lambda: fails_a_check(served.generator))
    served.generator.close(0.05)
    assert said.done.wait(PATIENCE) and isinstance(said.error, Draining)


@pytest.mark.parametrize(("said", "stays"), [("CUDA error: device-side assert triggered", True), ("another", False)])
def test_a_device_that_fails_for_good_fails_the_check(small, said, stays):
    """Without a GPU: the decoder raises what torch raises for one."""
    served = Served(small)

    def fail(step):
        raise RuntimeError(said)

    served.inner.loop._decoder.run = fail
    answer = served.ask([3], Sampling(max_tokens=3))
    assert answer.done.wait(PATIENCE) and isinstance(answer.error, Internal)
    assert fails_a_check(served.generator) == stays
    served.generator.close(PATIENCE)


def test_failures_with_steps_between_them_fail_no_check(small, monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0)
    monkeypatch.setattr(module, "MOST_FAILURES", 2)
    served = Served(small)
    step, calls = served.inner.loop._drop, []

    def failing(now):
        served.generator.check()  # a second failure in a row would fail the check, and so the next step
        calls.append(now)
        if len(calls) % 2:
            raise HplmError("every other time")
        step(now)

    served.inner.loop._drop = failing
    said = served.ask([3], Sampling(max_tokens=20, ignore_eos=True))
    assert said.done.wait(PATIENCE) and said.error is None
    served.generator.check()
    served.generator.close(PATIENCE)


@pytest.mark.parametrize("place", ["a step", "a reader"])
def test_what_hangs_fails_the_check_until_it_gets_on(small, monkeypatch, place):
    served = Served(small)
    step, hangs, goes_on = served.inner.loop._drop, threading.Event(), threading.Event()

    def hanging():
        hangs.set()
        assert goes_on.wait(PATIENCE)

    if place == "a step":
        served.inner.loop._drop = lambda now: (hanging(), step(now))
    said = served.ask([3], Sampling(max_tokens=3), before=hanging if place == "a reader" else lambda: None)
    assert hangs.wait(PATIENCE)
    served.generator.check()
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
    eventually(lambda: fails_a_check(served.generator))
    goes_on.set()
    assert said.done.wait(PATIENCE)
    eventually(lambda: not fails_a_check(served.generator))
    served.generator.close(PATIENCE)
