"""Requests to models whose Triton is played here: who is refused at once, how each is answered, and as what it counts."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from hplm.errors import BY_WORD, Crashed, DeadlineMissed, Draining, Internal, InvalidInput, OutOfCapacity
from hplm.generation.request import LENGTH
from hplm.lookup.service import LookupService
from hplm.metrics import names
from hplm.metrics.meter import Meter, Outcomes
from hplm.request.answers import LARGE, AnswerEnd, Reply, SharedMemory, strings
from hplm.request.form import PROBE, TicketHead, write
from hplm.server import inherited
from hplm.server.held import Held, holders
from hplm.server.probing import PROBE as PROBED
from hplm.tenants.arrival import ARRIVAL, FORWARDED, Forwarding
from testing.toy import WORDS
from tests.support.fake_triton import (
    FINAL,
    Inputs,
    Request,
    Tensor,
    TritonError,
    arguments,
    fake_utilities,
    model_of,
    with_fake_triton,
)
from tests.support.message import mentioning, mentions
from tests.support.servers import server_environment
from tests.support.wait import PATIENCE


class Freed(Request):
    """A request whose memory Triton frees with its last response. To ask about it then would end the server process.

    Whoever talks of it waits until `other` is set: another thread has come, to the sender's lock or past it.
    """

    def __init__(self):
        super().__init__({}, {})
        self.is_there, self.asked, self.talks, self.other = True, 0, threading.Event(), threading.Event()
        self.is_cancelled = self._is_cancelled

    def _is_cancelled(self):
        self.asked += 1
        self._talk()
        assert self.is_there
        return False

    def send(self, response, flags):
        self.is_there = flags != FINAL
        self._talk()

    def _talk(self):
        if self.talks.is_set():
            self.other.set()
        self.talks.set()
        assert self.other.wait(PATIENCE)


class Lock:
    """Tells a request when somebody waits for it."""

    def __init__(self, request):
        self._request, self._lock = request, threading.Lock()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self._request.other.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


@pytest.mark.parametrize("first", ["asks", "sends"])
def test_a_request_is_not_asked_about_after_its_last_response(first):
    request = Freed()
    with with_fake_triton(fake_utilities(), "backends.replies") as (replies,), ThreadPoolExecutor(2) as pool:
        replies.threading = SimpleNamespace(Lock=lambda: Lock(request))
        sender = replies.Sender(request, Held("toy"))
        both = {"asks": lambda: sender.is_cancelled, "sends": lambda: sender.send("the end")}
        asking = pool.submit(both.pop(first))
        assert request.talks.wait(PATIENCE)
        beside = pool.submit(*both.values())
        beside.add_done_callback(lambda _: request.other.set())
        assert {asking.result(PATIENCE), beside.result(PATIENCE)} == {False, None}
        asked = request.asked
        assert sender.is_cancelled is False and request.asked == asked == (first == "asks")


def test_a_request_is_asked_about_between_its_responses():
    request = Freed()
    request.other.set()
    with with_fake_triton(fake_utilities(), "backends.replies") as (replies,):
        sender = replies.Sender(request, Held("toy"))
        sender.send("a part", is_last=False)
        assert sender.is_cancelled is False and request.asked == 1


def test_an_answer_is_returned_until_its_request_is_deferred_and_small_ones_alone_unless_they_are_many(monkeypatch):
    with server_environment(monkeypatch) as server, with_fake_triton(fake_utilities(), "backends.replies") as (replies,):
        requests = [Request({}, {}) for _ in range(6)]
        sizes = dict(zip(requests, (1, 1, LARGE, LARGE // 2, LARGE // 2), strict=False))

        class Own(replies.BackendModel):
            defers = False

            def _take(self, request, given, sender, received_ns):
                if request is requests[1]:
                    sender.defer()
                if request not in sizes:
                    raise Draining("soon")
                assert shown.held
                sender.send_answer({"SCORE": np.zeros(sizes[request], dtype=np.uint8)})

        model = Own()
        model.initialize(arguments(Path("toy"), {}))
        (shown,) = holders(server)
        responses = model.execute(requests)
        assert [response is not None for response in responses] == [True, False, False, True, False, True]
        assert all(requests[number].next() for number in (1, 2, 4)) and not shown.held
        model.finalize()


@pytest.fixture
def answering():
    """Returns an answer of a decoder, its request and what is counted of it. Its first `fits` pieces find shared memory."""
    with with_fake_triton(fake_utilities(), "backends.replies", "backends.hplm_generate.model") as (replies, model):

        def answer(fits=100):
            request, counted, replies.SHARED_MEMORY = Request({}, {}), [], MagicMock()
            replies.SHARED_MEMORY.taken.side_effect = [MagicMock()] * fits + [OutOfCapacity("no shared memory")]
            sender = replies.Sender(request, Held("toy"))
            return model.GenerateRequest(sender, sends_errors, counted.append, b""), request, counted

        replies.LARGE = 0  # of a module that is forgotten
        sends_errors = replies.BackendModel()
        sends_errors.initialize(arguments(Path("toy"), {}))
        yield answer
        sends_errors.finalize()


def part(end=None):
    return Reply([(1, 1)], {"text_output": strings([b"a"])}, end=end)


END = AnswerEnd(LENGTH, 2, 1, 0)
LATE = DeadlineMissed("late")


@pytest.mark.parametrize(
    ("said", "fits", "counted", "flags"),
    [
        ([part(), part(END)], 100, END, [0, FINAL]),
        ([Reply([(1, 1)], {}, LATE)], 100, DeadlineMissed.word, [FINAL]),
        ([part(), Crashed("the engine has ended")], 100, Crashed.word, [0, FINAL]),
        ([part()], 0, OutOfCapacity.word, [FINAL]),
        ([part(), part(END)], 1, OutOfCapacity.word, [0, FINAL]),
    ],
)
def test_an_answer_of_a_decoder_is_counted_once_by_the_end_that_its_client_got(answering, said, fits, counted, flags):
    answer, request, found = answering(fits)
    for one in said[:-1]:
        answer.respond(one)
    if counted == OutOfCapacity.word:
        with pytest.raises(OutOfCapacity):
            answer.respond(said[-1])
        answer.respond(part(END._replace(reason="cancelled")))  # what cannot be sent is cancelled
    else:
        answer.respond(said[-1])
    last = [request.next() for _ in flags][-1]
    assert found == [counted] and request.flags == flags and answer.ended
    assert isinstance(last, str) == (counted is not END), "an error is its message"


def test_an_end_that_triton_does_not_take_is_counted_as_an_error(answering):
    answer, request, counted = answering()
    request.send = MagicMock(side_effect=RuntimeError("Triton does not take it"))
    with pytest.raises(RuntimeError):
        answer.respond(part())
    assert not counted and not answer.ended  # its end is still to come
    with pytest.raises(RuntimeError):
        answer.respond(part(END))
    assert counted == [Internal.word] and answer.ended


def test_a_ticket_that_upper_does_not_take_is_refused_and_counted_by_the_reason_and_no_probe():
    """Which byte of a ticket was changed: `tests/request/test_form.py`."""
    ticket, requests = write(b"ours", TicketHead("law", "acme", 0, 0, 1, 1), [0], [0], b"", b"", b""), []
    for form in (ticket, b"forged", PROBE):
        requests.append(Request({}, {}))
        requests[-1].inputs = Inputs({"TICKET": Tensor("TICKET", np.frombuffer(form, np.uint8))})
    requests[0].request_id = MagicMock(side_effect=UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    with with_fake_triton(fake_utilities(), "backends.replies", "backends.hplm_upper.model") as (_, module):
        model = module.TritonPythonModel()
        check = MagicMock(side_effect=Draining("soon"))
        model._client = MagicMock(workers=SimpleNamespace(check=check))
        model._meter = meter = Outcomes()
        model._secret, model._held, model._has_journal = b"ours", Held("toy-upper"), True
        assert [said.partition("]")[0] for said in model.execute(requests)] == ["[invalid_input", "[no_tenant", "[draining"]
        model._held.close()
    assert meter.take()[0] == {(names.REQUESTS, ("", word)): 1 for word in ("invalid_input", "no_tenant")}


def test_a_model_of_several_backbones_is_refused_with_the_way_to_write_it_again(toy):
    """Upper models of groups once computed several."""
    with with_fake_triton(fake_utilities(), "backends.replies", "backends.hplm_upper.model") as (_, module):
        model = module.TritonPythonModel()
        with pytest.raises(InvalidInput, match=mentioning("'toy deep'", "hplm place emit")):
            model.initialize(arguments(toy.repository / "toy+deep-upper", {"backbones": "toy deep"}))
        model._held.close()


def test_only_requests_that_the_alias_has_forwarded_say_their_arrival_and_a_probe_is_answered_uncounted(toy, monkeypatch):
    taken, forwarding = [], Forwarding(os.getppid())
    monkeypatch.setattr(LookupService, "submit", lambda service, requests: taken.extend(requests))
    with server_environment(monkeypatch), model_of(toy.repository, "toy-lookup", "hplm_lookup") as model:
        for forwarded in (forwarding.parameters(5), {}, *({FORWARDED: forged, ARRIVAL: 5} for forged in ("", "0" * 64, True))):
            model.execute([Request({"TEXT": [WORDS[0]]}, {"tenant": "acme", **forwarded})])
        model._service.meter.take()
        (probe,) = model.execute([Request({"TEXT": [""]}, {PROBED: True})])
        assert probe["TICKET"].tobytes() == PROBE and not model._service.meter.take()[0], "it was counted"
    assert [one.head.arrival_ns == 5 for one in taken] == [True, False, False, False, False]


def test_a_server_that_is_to_stop_fails_probes_first_and_then_refuses_all_and_counts_no_probe(monkeypatch):
    monkeypatch.setattr(inherited, "_SECONDS_BETWEEN_LOOKS", 0)  # at each request
    refused, counted = [], []
    with server_environment(monkeypatch), with_fake_triton(fake_utilities(), "backends.replies") as (replies,):

        class Own(replies.BackendModel):
            defers, _count = False, staticmethod(counted.append)

            def _take(self, request, given, sender, received_ns):
                sender.send_answer({})

        model = Own()
        model.initialize(arguments(Path("toy"), {}))
        for begin in (lambda server: None, inherited.start_to_leave, inherited.start_to_drain):
            begin(inherited.server())
            both = model.execute([Request({}, {}), Request({}, {PROBED: True})])
            refused.append([isinstance(said, str) and "[draining]" in said for said in both])
        model.finalize()
    assert refused == [[False, False], [False, True], [True, True]] and counted == [Draining.word]


def test_a_ticket_without_shared_memory_is_counted_as_refused(toy, monkeypatch):
    with server_environment(monkeypatch), model_of(toy.repository, "toy-lookup", "hplm_lookup") as model:
        meter = model._service.meter = Meter()
        monkeypatch.setattr("backends.replies.LARGE", 0)
        monkeypatch.setattr("backends.replies.SHARED_MEMORY", SharedMemory(lambda: 0))
        model.execute([request := Request({"TEXT": [WORDS[0]]}, {"tenant": "acme"})])
    counts = {labels: count for (metric, labels), count in meter.take()[0].items() if metric is names.LOOKUPS}
    assert request.next().startswith("[capacity]") and counts == {("capacity",): 1}


def test_a_proxy_that_sends_requests_on_gets_another_status_for_draining_alone():
    with with_fake_triton(fake_utilities(), "backends.replies", "backends.hplm_alias.model") as (replies, alias):
        for error in BY_WORD.values():
            said = error("why")
            of_backbone = SimpleNamespace(error=lambda said=said: SimpleNamespace(message=said.wire))
            for found in (replies.failure(said, resends=True), alias.refusal(of_backbone, "toy", resends=True)):
                assert found.code == getattr(TritonError, "UNSUPPORTED" if error is Draining else error.status), error
            assert replies.failure(said).code == getattr(TritonError, error.status)


def test_an_unexpected_error_shows_where_it_was_raised_and_not_what_it_holds(caplog):
    secret = "hplm_a-secret-of-a-client"

    def broken_code():
        raise KeyError(f"Bearer {secret}")

    with with_fake_triton(fake_utilities(), "backends.replies") as (replies,):
        try:
            broken_code()
        except KeyError as error:
            said = replies.failure(error, "lookup")
    assert mentions(said, "[internal]", "lookup", "KeyError") and secret not in said
    assert mentions(caplog.text, "lookup", "KeyError", "broken_code") and secret not in caplog.text
