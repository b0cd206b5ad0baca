"""Each answer of a decoder is counted once, by the end that its client was told."""

from unittest.mock import MagicMock

import pytest

from hplm.errors import Crashed, DeadlineMissed, Internal, OutOfCapacity
from hplm.generation.request import LENGTH
from hplm.request.answers import End, Reply, strings
from hplm.server.held import Held
from tests.support.fake_triton import FINAL, Request, fake_utilities, with_fake_triton


@pytest.fixture
def model():
    with with_fake_triton(fake_utilities(), "backends.replies", "backends.hplm_generate.model") as (_, model):
        yield model


@pytest.fixture
def answering(model, monkeypatch):
    """Returns an answer, its request and what is counted of it. No piece but the first `fits` find room in shared memory."""

    def answer(fits=100):
        request, counted, memory = Request({}, {}), [], MagicMock()
        memory.taken.side_effect = [MagicMock()] * fits + [OutOfCapacity("no shared memory")]
        monkeypatch.setattr(model.replies, "LARGE", 0)
        monkeypatch.setattr(model.replies, "SHARED_MEMORY", memory)
        return model.Answer(model.replies.Sender(request, Held("toy")), counted.append), request, counted

    return answer


def part(end=None):
    return Reply([(1, 1)], {"text_output": strings([b"a"])}, end=end)


END = End(LENGTH, 2, 1, 0)
LATE = DeadlineMissed("late").failure()


@pytest.mark.parametrize(
    ("said", "fits", "counted", "flags"),
    [
        ([part(), part(END)], 100, END, [0, FINAL]),
        ([Reply([(1, 1)], {}, LATE)], 100, DeadlineMissed.word, [FINAL]),
        ([part(), Crashed("the engine has ended").failure()], 100, Crashed.word, [0, FINAL]),
        ([part()], 0, OutOfCapacity.word, [FINAL]),
        ([part(), part(END)], 1, OutOfCapacity.word, [0, FINAL]),
    ],
)
def test_an_answer_is_counted_by_the_end_that_its_client_got(answering, said, fits, counted, flags):
    answer, request, found = answering(fits)
    for one in said[:-1]:
        answer.say(one)
    if counted == OutOfCapacity.word:
        with pytest.raises(OutOfCapacity):
            answer.say(said[-1])
        answer.say(part(END._replace(reason="cancelled")))  # what cannot be sent is cancelled
    else:
        answer.say(said[-1])
    last = [request.next() for _ in flags][-1]
    assert found == [counted] and request.flags == flags and answer.ended
    assert isinstance(last, str) == (counted is not END), "an error is its message"


def test_an_end_that_triton_does_not_take_is_counted_as_an_error(answering, monkeypatch):
    answer, request, counted = answering()
    monkeypatch.setattr(request, "send", MagicMock(side_effect=RuntimeError("Triton does not take it")))
    with pytest.raises(RuntimeError):
        answer.say(part())
    assert not counted and not answer.ended  # its end is still to come
    with pytest.raises(RuntimeError):
        answer.say(part(END))
    assert counted == [Internal.word] and answer.ended
