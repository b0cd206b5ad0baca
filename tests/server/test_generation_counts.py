"""Each answer of a decoder is counted once, by the end that its client was told, and clients that have gone are looked for."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from hplm.errors import Crashed, DeadlineMissed, Internal, OutOfCapacity
from hplm.generation.request import LENGTH
from hplm.request.answers import End, Reply, strings
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
        return model.Answer(sender, counted.append), request, counted

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
    assert found == [counted] and [own for _, own in request.sent] == flags and answer.ended
    assert isinstance(request.sent[-1][0], str) == (counted is not END), "an error is its message"


def test_an_end_that_triton_does_not_take_is_counted_as_an_error(answering):
    answer, _, counted = answering(fails=True)
    with pytest.raises(RuntimeError):
        answer.say(part())
    assert not counted and not answer.ended  # its end is still to come
    with pytest.raises(RuntimeError):
        answer.say(part(END))
    assert counted == [Internal.word] and answer.ended


@dataclass(eq=False)
class Pending:
    grows: bool
    is_cancelled: bool = False


def test_clients_of_growing_answers_are_looked_for_each_time_and_of_waiting_ones_in_turn(model):
    """To ask is a round trip to the server process, and thousands may wait."""
    many, looks = 3 * model.MOST_WAITING, 4
    waits, grows = [Pending(False) for _ in range(many)], [Pending(True) for _ in range(5)]
    asked, so_far = [], []
    gone, ended = {waits[-1], grows[-1]}, {waits[0], grows[0]}

    class Answer:
        def __init__(self, pending):
            self.pending, self.ended = pending, pending in ended

        @property
        def is_unwanted(self):
            so_far.append(self.pending)
            return self.pending in gone

    served = model.TritonPythonModel()
    served._open = {pending: Answer(pending) for pending in (*waits, *grows)}
    served._ending = SimpleNamespace(wait=lambda seconds: False)
    served._client = SimpleNamespace(cancel=lambda pending: setattr(pending, "is_cancelled", True))
    for _ in range(looks):
        assert served._look_for_cancelled()
        asked.append([*so_far])
        so_far.clear()
    of_waiting = [[pending for pending in look if not pending.grows] for look in asked]
    assert [len(look) for look in of_waiting] == [model.MOST_WAITING] * looks
    assert {id(pending) for look in of_waiting[:3] for pending in look} == {id(pending) for pending in waits[1:]}
    assert [sum(pending is grows[1] for pending in look) for look in asked] == [1] * looks
    assert waits[-1].is_cancelled and grows[-1].is_cancelled
    assert [pending for pending in served._open if pending.is_cancelled or pending in ended] == []
