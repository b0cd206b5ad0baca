"""Texts to an encoder, by a client and by `hplm infer`, against a fake Triton."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
from client_fakes import forwarding, raising
from triton_fakes import Refusal, echo, tensors

import hplm_client
from hplm.cli.main import parsed
from hplm.errors import HplmError
from hplm_client import (
    Answer,
    ClientTimeout,
    DeadlineMissed,
    InvalidInput,
    LateAnswer,
    NoBackbone,
    NoTenant,
    QueueFull,
    Row,
    ServerFault,
    Tenant,
    UnexpectedAnswer,
)
from tests.support.wait import PATIENCE, Hold
from tests.support.ways import Way, generate, infer, read, ready

REFUSALS = {  # by word: the class of its exception, and whether the request is sent again
    "invalid_input": ("InvalidInput", False), "no_tenant": ("NoTenant", False), "queue_full": ("QueueFull", True),
    "quota": ("QuotaExceeded", True), "deadline": ("DeadlineMissed", False), "draining": ("Draining", True),
    "capacity": ("OutOfCapacity", False), "internal": ("Internal", False), "broken": ("Broken", False),
    "crashed": ("Crashed", False), "quarantined": ("Quarantined", False),
}  # fmt: skip


def test_texts_and_pairs_come_back_with_their_labels_in_their_order(ask):
    odd = "naïve 文字 \N{PILE OF POO}"
    answer = ask(lambda client: infer(client, odd))
    assert answer == Answer((Row(odd, 1.0, (0, 10)),), "v7")
    assert (answer.label, answer.score, answer.labels) == (odd, 1.0, (odd,))
    texts = [f"text {number}" for number in range(100)]
    assert [answer.label for answer in ask(lambda client: client.infer_batch(texts, tenant="acme"))] == texts
    assert [answer.label for answer in ask(lambda client: client.infer_batch(np.array(texts), tenant="acme"))] == texts
    answers = ask(lambda client: client.infer_batch(["a", "b"], pairs=["c", ""], tenant="acme"))
    assert [answer.label for answer in answers] == ["a|c", "b|"]
    assert ask(lambda client: infer(client, pair="d")).label == "a|d"


def test_each_text_has_its_own_rows_and_further_outputs_only_on_request(ask, fake):
    rows = [[("A", 0.5, (0, 1)), ("", 0.0, (2, 3)), ("B", 0.25, (4, 5))], [("C", 0.5, (0, 1))], []]
    logits = np.arange(18).reshape(3, 3, 2)
    fake.answer = lambda _: tensors(rows, LOGITS=logits, CONFIDENCE=[[0.25], [-1], [-1]], LEVEL=[[2], [1], [1]])
    more = {"logits": True, "confidence": True, "parameters": {"hplm_rung": 1}}
    full = ask(lambda client: client.infer_batch(["one", "two", " "], tenant="acme", **more))
    assert [[(row.label, row.score, row.span) for row in answer.rows] for answer in full] == rows
    assert [[row.logits for row in answer.rows] for answer in full] == [[(0, 1), None, (4, 5)], [(6, 7)], []]
    assert [(answer.confidence, answer.level) for answer in full] == [(0.25, 2), (None, 1), (None, 1)]
    assert (full[2].label, full[2].score) == (None, None)
    plain = ask(lambda client: client.infer_batch(["one", "two", " "], tenant="acme"))
    assert {(row.logits, answer.confidence, answer.level) for answer in plain for row in answer.rows} == {(None, None, None)}
    fake.answer = lambda _: tensors(rows, LOGITS=logits[:, :1])  # of the first row only
    first = ask(lambda client: client.infer_batch(["one", "two", " "], tenant="acme", logits=True))[0]
    assert [row.logits for row in first.rows] == [(0, 1), None, None]


def strings(*rows):
    return np.array(rows, np.object_)


@pytest.mark.parametrize(
    "changed",
    [
        *({"LABEL": wrong} for wrong in (
            strings([b"a"]), strings(b"a", b"b"), strings([b"\xff", b"a"], [b"a", b"b"]), np.ones((2, 2), np.int32))),
        {"SCORE": np.ones((2, 1), np.float32)}, {"SPAN": np.ones((2, 2, 3), np.int32)}, {"LOGITS": np.ones((1, 1), np.float32)},
        {"VERSION": strings([b"1", b"2"], [b"1", b"2"])}, {"CONFIDENCE": np.ones((1, 1), np.float32)},
        {"LEVEL": np.ones((1, 1), np.int32)},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_of_another_shape_is_refused(fake, changed):
    rows, more = [[("A", 0.5, (0, 1))] * 2] * 2, {"LOGITS": [[[1]] * 2] * 2, "CONFIDENCE": [[1]] * 2, "LEVEL": [[1]] * 2}

    def ask(answer):
        fake.answer = lambda _: answer
        more = {"logits": True, "confidence": True, "parameters": {"hplm_rung": 1}}
        use = lambda client: client.infer_batch(["a", "b"], tenant="acme", **more)  # noqa: E731
        return Way("http").call(fake.http_url, use, backbone="minilm")

    assert len(ask(tensors(rows, **more))) == 2
    with pytest.raises(UnexpectedAnswer):
        ask({**tensors(rows, **more), **changed})


def test_a_vector_and_the_tokens_are_asked_for_and_read(ask, fake):
    vectors = {"EMBEDDING": np.array([[0.6, 0.8], [1, 0]], np.float32), "TOKENS": np.array([[3], [5]], np.int32)}
    fake.answer = lambda _: tensors([[("A", 0.5, (0, 1))]] * 2) | vectors
    asked = {"tenant": "near", "tokens": True, "parameters": {"hplm_prefix": "query"}}
    both = ask(lambda client: client.infer_batch(["a", "b"], embedding=True, **asked))
    assert [one.embedding for one in both] == [pytest.approx((0.6, 0.8)), (1, 0)]
    assert [(one.rows, one.tokens, one.version) for one in both] == [((), 3, "v7"), ((), 5, "v7")]
    assert fake.requests[-1].parameters == {
        "tenant": "near", "hplm_prefix": "query", "outputs": "EMBEDDING,VERSION,TOKENS",
    }  # fmt: skip
    rows = ask(lambda client: client.infer_batch(["a", "b"], **asked))
    assert [(one.label, one.embedding, one.tokens) for one in rows] == [("A", None, 3), ("A", None, 5)]
    said = "[invalid_input] the tenant has the task embed, which answers with EMBEDDING: name that in outputs, not LABEL"
    fake.script = [Refusal(said, 400)]
    with raising(InvalidInput, match="embedding=True"):
        ask(lambda client: client.infer("a", tenant="near"))
    fake.answer = lambda _: {**tensors([[("A", 0.5, (0, 1))]]), "EMBEDDING": np.zeros((2, 2), np.float32)}
    with raising(UnexpectedAnswer):
        ask(lambda client: client.infer("a", tenant="near", embedding=True))


def test_parameters_key_and_deadline_reach_the_model(ask, fake):
    more = {"request_id": "ours-7", "parameters": {"hplm_rung": 2}}
    ask(lambda client: infer(client, truncate=True, top_k=1, priority=3, deadline_ms=60_000, **more), api_key="K3Y")
    ask(infer)
    given, plain = fake.requests
    assert (given.id, plain.id) == ("ours-7", "")
    assert 0 < given.parameters.pop("timeout") <= 60_000_000
    outputs = {"outputs": "LABEL,SCORE,SPAN,VERSION"}
    asked = {"tenant": "acme", "truncate": True, "top_k": 1, "hplm_priority": 3, "hplm_rung": 2}
    assert given.parameters == {**asked, "outputs": "LABEL,SCORE,SPAN,VERSION,LEVEL"}
    assert given.headers.items() >= {"authorization": "Bearer K3Y", "hplm-tenant": "acme"}.items()
    assert plain.parameters == {"tenant": "acme"} | outputs and plain.headers["hplm-tenant"] == "acme"
    assert plain.headers.get("accept-encoding", "identity") == "identity", "Triton would compress the answer"
    assert "authorization" not in plain.headers and set(plain.outputs) == {"LABEL", "SCORE", "SPAN", "VERSION"}


def test_a_key_and_an_id_of_a_call_are_sent_with_it_alone(ask, fake):
    for call, backbone in ((infer, "minilm"), (generate, "chat"), (read, "chat")):
        ask(partial(call, api_key="own", request_id="ours-7"), backbone=backbone, api_key="K3Y")
        ask(call, backbone=backbone, api_key="K3Y")
        own, plain = fake.requests[-2:]
        sent = [{**one.headers, **one.parameters} for one in (own, plain)]
        assert [one["authorization"] for one in sent] == ["Bearer own", "Bearer K3Y"]
        assert (own.id, plain.id) == ("ours-7", "")


def test_tenants_are_listed_by_all_backbones_or_by_the_named_one(ask, fake):
    def answer(request):
        told = [{"tenant": "acme", "task": "classify"}, {"tenant": "near", "task": "embed", "dimensions": 8, "prefixes": ["q"]}]
        if request.model == "chat":
            raise Refusal("ModelInfer RPC doesn't support models with decoupled transaction policy", 400)
        if (named := request.parameters.get("tenant")) is not None:
            if named != "acme":
                raise Refusal("[no_tenant] no such tenant", 404)
            told = [{**told[0], "labels": ["x", "y"]}]
        return {"LABEL": np.array([[json.dumps(told).encode()]], np.object_)}

    fake.answer, fake.parts = answer, [{"text_output": json.dumps([{"tenant": "luna", "task": "generate"}])}]
    encoders, decoder = [Tenant("acme", "classify", "minilm")], Tenant("luna", "generate", "chat")
    encoders.append(Tenant("near", "embed", "minilm", None, 8, ("q",)))
    for backbone, found in ((None, [*encoders, decoder]), ("minilm", encoders), ("chat", [decoder])):
        assert ask(lambda client: client.tenants(api_key="own"), backbone=backbone) == found
        assert {**fake.requests[-1].headers, **fake.requests[-1].parameters}["authorization"] == "Bearer own"
    assert ask(lambda client: client.tenants("acme")) == [Tenant("acme", "classify", "minilm", ("x", "y"))]
    with raising(NoTenant):
        ask(lambda client: client.tenants("nobody"))
    fake.parts = [{"text_output": "ok"}]
    with raising(UnexpectedAnswer):
        ask(lambda client: client.tenants(), backbone="chat")


def test_an_answer_after_its_deadline_is_marked_and_an_error_if_its_client_wants_that(ask, fake, monkeypatch):
    monkeypatch.setattr("hplm_client.retry.GRACE_S", PATIENCE)
    fake.answer = lambda request: (time.sleep(0.02), echo(request))[1]
    assert ask(partial(infer, deadline_ms=1)).late and not ask(infer).late
    assert not ask(partial(infer, deadline_ms=1000 * PATIENCE), late_is_error=True).late
    with raising(LateAnswer, match="deadline of 1 ms") as caught:
        ask(partial(infer, deadline_ms=1), late_is_error=True)
    (answer,) = caught.value.answers
    assert answer.label == "a" and answer.late and isinstance(caught.value, DeadlineMissed)


def test_more_texts_than_a_request_may_have_are_several_requests(ask, fake):
    texts = [f"text {number}" for number in range(2500)]
    few = fake.answer = lambda request: echo(request) if len(request.inputs["TEXT"]) <= 1024 else tensors([])
    answers = ask(lambda client: client.infer_batch(iter(texts), tenant="acme", pairs=map(str, range(2500))))
    assert [answer.label for answer in answers] == [f"text {number}|{number}" for number in range(2500)]
    assert [len(request.inputs["TEXT"]) for request in fake.requests] == [1024, 1024, 452]
    fake.requests, fake.answer = [], few
    long = ["a" * 1_500_000, "b" * 1_500_000, "c" * 1_500_000]
    answers = ask(lambda client: client.infer_batch(long, tenant="acme", pairs=["", "", "d" * 2_600_000]))
    assert [answer.label[:1] for answer in answers] == ["a", "b", "c"] and len(fake.requests) == 2


def test_each_request_of_a_long_list_is_sent_again_by_itself_and_all_have_one_deadline(fake):
    fake.script = [Refusal("[queue_full] retry after 1 ms")]
    asked = lambda client: client.infer_batch(["a"] * 2000, tenant="acme", deadline_ms=1e6)  # noqa: E731
    assert len(Way("http").call(fake.http_url, asked, backbone="minilm")) == 2000
    first, again, second = (request.parameters["timeout"] for request in fake.requests)
    assert first > again > second


def test_the_longest_times_can_be_waited_for(ask):
    for call in (infer, generate):
        for deadline_ms in (None, 1_000_000_000):
            settings = {"backbone": "minilm" if call is infer else "chat", "network_timeout": 1_000_000}
            assert ask(partial(call, deadline_ms=deadline_ms), **settings)


def test_a_refusal_has_its_class_and_only_a_request_that_was_not_taken_is_sent_again(ask, fake):
    for word, (kind, is_sent_again) in REFUSALS.items():
        said = f"in ensemble 'minilm', [{word}] no, retry after 1 ms [quota]"
        fake.requests, fake.script = [], [Refusal(said)] * 2
        with raising(getattr(hplm_client, kind)) as caught:
            ask(infer, retries=1)
        assert said in str(caught.value) and caught.value.word == word, word
        assert caught.value.status == 503
        assert len(fake.requests) == 1 + is_sent_again, f"{word} was sent {len(fake.requests)} times"
    fake.requests, fake.script = [], [Refusal("[queue_full] retry after 1 ms")] * 2
    with raising(QueueFull):
        ask(infer, retries=0)
    assert ask(infer, retries=1).label == "a" and len(fake.requests) == 3
    fake.script = [Refusal("no word for this", 500)]
    with raising(ServerFault, match="no word for this"):
        ask(infer)
    with raising(NoBackbone, match="nope"):
        ask(infer, backbone="nope")


@pytest.mark.usefixtures("no_grace")
def test_the_next_request_after_a_timeout_is_fine(way, fake):
    hold = Hold()

    def answer(request):
        hold.pass_through()
        return echo(request)

    async def one_after_the_other(client):
        with raising(ClientTimeout):
            await client.infer("late", tenant="acme", deadline_ms=50)
        hold.open()
        return await client.infer("next", tenant="acme")

    fake.answer = answer
    with hold:
        assert way.run(way.url(fake), one_after_the_other, backbone="minilm").label == "next"


def test_the_only_backbone_is_found_and_of_two_one_must_be_named(ask, fake):
    assert [ask(ready, backbone=name) for name in ("minilm", None, "nope")] == [True, True, False]
    fake.models |= {"lone", "half", "half-lookup", "headless-lookup", "headless-upper"}
    assert ask(infer, backbone=None).label == "a"
    fake.models |= {"twin", "twin-lookup", "twin-upper", "b", "b-lookup", "b-upper"}
    assert ask(lambda client: client.backbones()) == ["b", "minilm", "twin"]
    with pytest.raises(NoBackbone, match="b, minilm, twin"):
        ask(infer, backbone=None)
    fake.models = {"lone"}
    with pytest.raises(NoBackbone, match=r"(?=.*-lookup\b)(?=.*-upper\b)"):
        ask(infer, backbone=None)
    fake.models = set()
    assert ask(lambda client: client.backbones()) == [], "gRPC leaves an empty list out"


def test_calls_share_a_client_and_do_not_wait_for_each_other(way, fake):
    """The server answers the latter only when it has all eight requests."""
    all_are_there = threading.Barrier(8)

    def answer(request):
        if request.inputs["TEXT"] == ["meet"]:
            all_are_there.wait(60)
        return echo(request)

    async def use(client):
        rounds = [f"text {number}" for number in range(100)], ["meet"] * 8
        for texts in rounds:
            answers = await asyncio.gather(*(client.infer(text, tenant="acme") for text in texts))
            assert [answer.label for answer in answers] == texts

    fake.answer = answer
    way.run(way.url(fake), use, backbone="minilm")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"texts": []}, "texts"), ({"texts": "abc"}, "str"), ({"pairs": "b"}, "str"), ({"tenant": ""}, "tenant"),
        ({"tenant": "acme\0x"}, "NUL"), ({"texts": ["a", "b"], "pairs": ["c"]}, r"2.*1"), ({"texts": ["a", b"b"]}, "texts 1"),
        ({"texts": 7}, "texts is int"), ({"texts": b"ab"}, "bytes"), ({"texts": {}.keys()}, "no texts"),
        ({"pairs": [None]}, "pairs 0"), ({"api_key": "two\nlines"}, "^api_key"), ({"request_id": 7}, "^request_id is 7"),
        *(({"parameters": {name: 1}}, f"'{name}'.*argument") for name in ("tenant", "top_k", "timeout", "outputs")),
        ({"parameters": {"hplm_rung": [1]}}, "^rung is"), ({"parameters": {"a": "\ud800"}}, "'a'.*UTF-8"),
        *(({"parameters": wrong}, "^parameters is") for wrong in (None, ["hplm_rung"], {1: 2})),
        ({"parameters": {"\ud800": 1}}, "UTF-8"), ({"texts": ["\ud800"]}, "TEXT 0.*UTF-8"),
        ({"tenant": "a\ud800"}, "tenant.*UTF-8"),
        ({"texts": np.array([])}, "texts"),
        *(({"deadline_ms": wrong}, "^deadline_ms is .*1,000,000,000") for wrong in (
            0, -1, float("nan"), float("inf"), 1e13, 1e16, "5", timedelta(seconds=1))),
        *(({name: wrong}, f"^{name} is .*9,223,372,036,854,775,807") for name in ("top_k", "priority") for wrong in (
            2**63, -(2**63) - 1, [1], np.int64(1))),
        *(({name: "false"}, f"^{name} is 'false'") for name in ("truncate", "logits", "confidence")),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_inputs_are_refused_before_they_are_sent(way, given, named):
    with pytest.raises(InvalidInput, match=named):
        way.call("127.0.0.1:1", lambda client: client.infer_batch(**{"texts": ["a"], "tenant": "acme", **given}))


def test_an_error_of_the_texts_iterable_is_raised_as_it_is():
    def texts():
        yield "a"
        raise TypeError("its own")

    with pytest.raises(TypeError, match="its own"), hplm_client.HplmClient("127.0.0.1:1", backbone="minilm") as client:
        client.infer_batch(texts(), tenant="acme")


def run(*arguments: str):
    command, given = parsed(["infer", *arguments])
    return command(*given.args, **given.kwargs)


@pytest.fixture
def told(fake, capsys, monkeypatch):
    """A function that runs the command, and returns its lines and the headers and parameters that have arrived."""
    monkeypatch.delenv("HPLM_API_KEY", raising=False)

    def told(*arguments):
        run(*arguments, "--url", fake.http_url, "--tenant", "acme")
        return capsys.readouterr().out.splitlines(), {**fake.requests[-1].headers, **fake.requests[-1].parameters}

    return told


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_fields_of_the_json(fake, protocol):
    scheme = "grpc://" if protocol == "grpc" else ""
    answer = run("a text", "--tenant", "acme", "--url", f"{scheme}{Way(protocol).url(fake)}")
    row = {"label": "a text", "score": 1.0, "span": [0, 6]}
    sure = {"confidence": None, "level": None, "late": False}
    assert answer == {"tenant": "acme", "label": "a text", "score": 1.0, "rows": [row], "version": "v7", **sure}


def test_a_table_for_people(fake, told):
    rows = [[("TWO", 1.0, (0, 3)), ("", 0.0, (5, 6)), ("WORDS", 1 / 3, (7, 12))]]
    fake.answer = lambda _: tensors(rows, CONFIDENCE=[[0.75]], LEVEL=[[2]])
    *table, last = told("two\n ~ words")[0]
    assert table == [
        "LABEL   SCORE  SPAN  TEXT",
        "TWO    1.0000   0-3  two",
        "-      0.0000   5-6  ~",
        "WORDS  0.3333  7-12  words",
    ]
    assert last == "tenant acme, version v7, confidence 0.7500"
    assert told("two\n ~ words", "--rung", "2")[0][-1].endswith("level 2, confidence 0.7500")
    fake.answer = lambda _: tensors([[("A", 0.5, (0, 100))]], CONFIDENCE=[[-1]])
    long, last = told("x" * 100)[0][1:]
    assert long.endswith("x" * 47 + "…") and last.endswith(" v7")
    assert told("x" * 100, "--pair", "two")[0][:2] == ["LABEL   SCORE   SPAN", "A      0.5000  0-100"]


def test_options_and_key_reach_the_server(told, monkeypatch):
    sent = told("a", "--truncate", "--top-k", "1", "--rung", "1", "--deadline-ms", "90000.5")[1]
    expected = {"tenant": "acme", "truncate": True, "top_k": 1, "hplm_rung": 1}
    assert sent.items() >= {**expected, "hplm-tenant": "acme"}.items() and 0 < sent["timeout"] <= 90_000_500
    for key, header in (("", None), ("FROM_ENVIRONMENT", "Bearer FROM_ENVIRONMENT")):
        monkeypatch.setenv("HPLM_API_KEY", key)
        assert told("a")[1].get("authorization") == header


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_tls_reaches_the_client(fake, certificate, scheme):
    with forwarding(fake.http_url if scheme == "https" else fake.grpc_url, pair=certificate[1]) as door:
        asked = ["a", "--tenant", "acme", "--url", f"{scheme}://{door.url}"]
        assert run(*asked, "--ca-file", str(certificate[0]))["label"] == "a"
        with pytest.raises(HplmError, match="--ca-file"):
            run(*asked)
