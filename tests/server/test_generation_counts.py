"""Each answer of a decoder is counted once, by the end that its client was told. Triton's part is played by a stand-in."""

from types import SimpleNamespace

import pytest

from hplm.errors import DeadlineMissed, Internal, OutOfCapacity
from hplm.generation.request import LENGTH, Piece
from hplm.server.held import Held
from tests.support.fake_triton import with_fake_triton

FINAL = 1


class TritonError(Exception):
    INTERNAL = UNAVAILABLE = 0

    def __init__(self, message, code):
        super().__init__(message)


class Request:
    """Keeps the responses. It refuses those that `fails` is true of."""

    def __init__(self, fails=lambda response: False):
        self.fails = fails
        self.sent = []

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        return False

    def send(self, response, flags):
        if self.fails(response):
            raise RuntimeError("Triton does not take it")
        assert not any(flags == FINAL for _, flags in self.sent), "something was sent behind the end"
        self.sent.append((response, flags))


def response(outputs=(), error=None):
    return SimpleNamespace(outputs=outputs, error=error)


@pytest.fixture
def model():
    stand_in = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        InferenceResponse=response,
        Tensor=lambda name, values: (name, values),
        TritonError=TritonError,
    )
    with with_fake_triton(stand_in, "backends.replies", "backends.hplm_generate.model") as (_, model):
        yield model


@pytest.fixture
def answering(model, monkeypatch):
    """Returns an answer, its request and what is counted of it. No piece but the first `fits` find room in shared memory."""

    def answer(fits=100, **request):
        held, counted, taken = Request(**request), [], []

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

        monkeypatch.setattr(model.replies, "SHARED_MEMORY", Memory())
        sender = model.replies.Sender(held, Held("toy"))
        wanted = model.Wanted(stream=True, choices=1, returned=frozenset())
        return model.Answer(sender, wanted, None, counted.append), held, counted

    return answer


def piece(finish=None, is_last=False):
    return Piece(0, "a", (), finish, is_last, 2, 1)


def test_an_answer_is_counted_by_its_last_piece(answering):
    answer, request, counted = answering()
    answer.say(piece())
    last = piece(LENGTH, is_last=True)
    answer.say(last)
    assert counted == [last] and [flags for _, flags in request.sent] == [0, FINAL] and answer.ended


def test_an_error_is_counted_by_its_word(answering):
    answer, request, counted = answering()
    answer.say(DeadlineMissed("late"))
    assert counted == [DeadlineMissed.word] and len(request.sent) == 1


@pytest.mark.parametrize("fits", [0, 1])
def test_an_error_in_place_of_a_piece_is_what_is_counted(answering, fits):
    answer, request, counted = answering(fits)
    pieces = [piece()] * fits + [piece(LENGTH, is_last=fits == 1)]
    for one in pieces[:-1]:
        answer.say(one)
    with pytest.raises(OutOfCapacity):
        answer.say(pieces[-1])
    answer.say(piece("cancelled", is_last=True))  # the generator cancels what cannot be sent
    assert counted == [OutOfCapacity.word] and answer.ended
    assert [flags for _, flags in request.sent] == [0] * fits + [FINAL] and request.sent[-1][0].error is not None


def test_an_end_that_triton_does_not_take_is_counted_as_an_error(answering):
    answer, _, counted = answering(fails=lambda response: True)
    with pytest.raises(RuntimeError):
        answer.say(piece())
    assert not counted and not answer.ended  # its end is still to come
    with pytest.raises(RuntimeError):
        answer.say(piece(LENGTH, is_last=True))
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
