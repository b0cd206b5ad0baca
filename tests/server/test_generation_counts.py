"""Each answer of a decoder is counted once, by the end that its client was told, and clients that have gone are looked for."""

from types import SimpleNamespace

import pytest

from hplm.errors import DeadlineMissed, Internal, OutOfCapacity
from hplm.generation.request import LENGTH, Piece
from hplm.server.held import Held
from tests.support.fake_triton import FINAL, Request, fake_utilities, with_fake_triton


class Failing(Request):
    """Refuses all responses if it `fails`, and keeps the others with their flags."""

    def __init__(self, fails=False):
        super().__init__({}, {})
        self.fails, self.sent = fails, []

    def send(self, response, flags):
        if self.fails:
            raise RuntimeError("Triton does not take it")
        assert FINAL not in [flags for _, flags in self.sent], "something was sent behind the end"
        self.sent.append((response, flags))


@pytest.fixture
def model():
    with with_fake_triton(fake_utilities(), "backends.replies", "backends.hplm_generate.model") as (_, model):
        yield model


@pytest.fixture
def answering(model, monkeypatch):
    """Returns an answer, its request and what is counted of it. No piece but the first `fits` find room in shared memory."""

    def answer(fits=100, fails=False):
        request, counted, taken = Failing(fails), [], []

        class Memory:
            def taken(self, size):
                taken.append(size)
                if len(taken) > fits:
                    raise OutOfCapacity("no shared memory")
                return self

            def __enter__(self):
                pass

            def __exit__(self, *error):
                pass

        monkeypatch.setattr(model.replies, "LARGE", 0)
        monkeypatch.setattr(model.replies, "SHARED_MEMORY", Memory())
        sender = model.replies.Sender(request, Held("toy"))
        return model.Answer(sender, None, counted.append, choices=1, stream=True, returned=()), request, counted

    return answer


def piece(finish=None, is_last=False):
    return Piece(0, "a", (), finish, is_last, 2, 1)


LAST = piece(LENGTH, is_last=True)


@pytest.mark.parametrize(
    ("said", "fits", "counted", "flags"),
    [
        ([piece(), LAST], 100, LAST, [0, FINAL]),
        ([DeadlineMissed("late")], 100, DeadlineMissed.word, [FINAL]),
        ([piece(LENGTH)], 0, OutOfCapacity.word, [FINAL]),
        ([piece(), LAST], 1, OutOfCapacity.word, [0, FINAL]),
    ],
)
def test_an_answer_is_counted_by_the_end_that_its_client_got(answering, said, fits, counted, flags):
    answer, request, found = answering(fits)
    for one in said[:-1]:
        answer.say(one)
    if counted == OutOfCapacity.word:
        with pytest.raises(OutOfCapacity):
            answer.say(said[-1])
        answer.say(piece("cancelled", is_last=True))  # the generator cancels what cannot be sent
    else:
        answer.say(said[-1])
    assert found == [counted] and [own for _, own in request.sent] == flags and answer.ended
    assert isinstance(request.sent[-1][0], str) == (counted is not LAST), "an error is its message"


def test_an_end_that_triton_does_not_take_is_counted_as_an_error(answering):
    answer, _, counted = answering(fails=True)
    with pytest.raises(RuntimeError):
        answer.say(piece())
    assert not counted and not answer.ended  # its end is still to come
    with pytest.raises(RuntimeError):
        answer.say(LAST)
    assert counted == [Internal.word] and answer.ended


def test_clients_of_growing_answers_are_looked_for_each_time_and_of_waiting_ones_in_turn(model):
    """To ask is a round trip to the server process, and thousands may wait."""
    many, looks = 3 * model.MOST_WAITING, 4
    waits = [SimpleNamespace(first_token_ns=0, cancelled=False) for _ in range(many)]
    grows = [SimpleNamespace(first_token_ns=1, cancelled=False) for _ in range(5)]
    gone, ended = {id(waits[-1]), id(grows[-1])}, {id(waits[0]), id(grows[0])}
    asked, so_far, waited = [], [], iter([False] * looks + [True])

    class Answer:
        def __init__(self, request):
            self.request, self.ended = request, id(request) in ended

        @property
        def is_unwanted(self):
            so_far.append(self.request)
            return id(self.request) in gone

    def wait(seconds):
        asked.append([*so_far])
        so_far.clear()
        return next(waited)

    served = model.TritonPythonModel()
    served._open = {Answer(request): request for request in (*waits, *grows)}
    served._ending = SimpleNamespace(wait=wait)
    served._service = SimpleNamespace(cancel=lambda request: setattr(request, "cancelled", True))
    served._look_for_cancelled()
    of_waiting = [[request for request in look if not request.first_token_ns] for look in asked[1:]]
    assert [len(look) for look in of_waiting] == [model.MOST_WAITING] * looks
    assert {id(request) for look in of_waiting[:3] for request in look} == {id(request) for request in waits[1:]}
    assert [sum(request is grows[1] for request in look) for look in asked[1:]] == [1] * looks
    assert waits[-1].cancelled and grows[-1].cancelled
    assert [request for request in served._open.values() if request.cancelled or id(request) in ended] == []
