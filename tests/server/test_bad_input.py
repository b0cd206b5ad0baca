"""Bad input to a running server: a clear error with its code and word, and the next request works."""

import json
import re
import urllib.error
import urllib.request

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError
from hplm.server import TritonServer
from hplm.tenants.ticket import TICKET_BYTES, Ticket
from testing.toy import WORDS
from tests.server.stock import LIBRARIES, Stock
from tests.support.message import mentioning, mentions
from tests.support.metrics import settled

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

STATUS = {"grpc": {400: "StatusCode.INVALID_ARGUMENT", 404: "StatusCode.NOT_FOUND", 503: "StatusCode.UNAVAILABLE",
                   500: "StatusCode.INTERNAL"},
          "http": {400: "400", 404: "404", 503: "503", 500: "500"}}  # fmt: skip


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    stock = server.stock(request.param)
    yield stock
    assert stock.ask([WORDS[0]], "city")["LABEL"].shape == (1, 1), "the next request is not fine"


def _refused(stock, code, words, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        stock.ask(*args, **kwargs)
    assert caught.value.status() == STATUS[stock.protocol][code], caught.value
    assert mentions(caught.value.message(), *words)


@pytest.mark.parametrize("text", ["", "   ", "\n\t", "\x00"])
def test_a_text_without_content_is_refused(stock, text):
    _refused(stock, 400, ["[invalid_input]", 1], [text], "city")


def test_one_empty_text_among_many_is_named(stock):
    _refused(stock, 400, ["[invalid_input]", 3, 4], [WORDS[0], WORDS[1], "", WORDS[2]], "city")


def test_a_text_longer_than_the_model_reads_is_refused_or_truncated(stock):
    text = " ".join(WORDS[:100])
    _refused(stock, 400, ["[invalid_input]", 102, 64, "truncate=true"], [text], "city")
    assert stock.ask([text], "city", truncate=True)["LABEL"].shape == (1, 1)
    tags = stock.ask([text], "beta", truncate=True)  # truncated words have a span but no label
    assert (tags["LABEL"][0, 62:] == b"").all() and (tags["LABEL"][0, :62] != b"").all()
    assert tags["SPAN"][0, 99].tolist() == [text.rindex(" ") + 1, len(text)]


def test_a_huge_text_is_refused(stock):
    _refused(stock, 400, ["[invalid_input]", "100,000"], ["wa " * 100_000], "city", truncate=True)


def test_invalid_utf8_is_refused(stock):
    _refused(stock, 400, ["[invalid_input]", "TEXT", 2, "UTF-8", 3], [b"fine", b"bad\xff\xfe"], "city")


@pytest.mark.parametrize("tenant", [None, "nobody", "ACME", "", "../city"])
def test_unknown_and_missing_tenants_get_the_same_error(stock, tenant):
    _refused(stock, 404, ["[no_tenant]"], [WORDS[0]], tenant)


def test_a_corrupt_record_fails_only_its_tenant(server, stock):
    well = server.tenant()
    manager = server.manager()
    record = next(one.adapter for one in manager.current().tenants if one.id == well.id)
    bank = manager.state.bank(record.bank)
    before = np.fromfile(bank, np.uint8)
    ill = server.tenant()  # in the same bank
    after = np.fromfile(bank, np.uint8)
    own = np.flatnonzero(np.resize(before, after.shape) != after)
    place = int(own[len(own) // 2])
    with open(bank, "r+b") as file:
        file.seek(place)
        file.write(bytes([after[place] ^ 1]))
    _refused(stock, 500, ["[broken]", f"{ill.id!r}", bank.name], [WORDS[0]], ill.id)
    assert stock.ask([WORDS[0]], well.id)["LABEL"].shape == (1, 1)


def test_a_thousand_texts_in_one_request_are_answered(stock):
    answer = stock.ask([WORDS[i % 100] for i in range(1000)], "city")
    assert answer["LABEL"].shape == (1000, 1)
    np.testing.assert_allclose(answer["LOGITS"][100], answer["LOGITS"][0], atol=1e-3)


def test_too_many_texts_in_a_request_are_refused(stock):
    _refused(stock, 400, ["1024"], [WORDS[0]] * 1025, "city")


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": "three"},
        {"top_k": -1},
        {"top_k": 70000},
        {"truncate": 1},
        {"truncate": "yes"},
        {"hplm_priority": True},
        {"hplm_rung": -1},
        {"hplm_rung": "1"},
    ],
)
def test_parameters_of_a_wrong_type_are_refused(stock, parameters):
    _refused(stock, 400, ["[invalid_input]", f"'{next(iter(parameters))}'"], [WORDS[0]], "city", **parameters)


def test_top_k_is_refused_for_tag(stock):
    _refused(stock, 400, ["[invalid_input]", "top_k"], [WORDS[0]], "beta", top_k=2)


def test_a_tenant_without_a_ladder_has_one_rung(stock):
    _refused(stock, 400, ["[invalid_input]", "hplm_rung", "2", "'city'"], [WORDS[0]], "city", hplm_rung=2)


@pytest.mark.parametrize(("timeout", "word"), [(1, "[deadline]"), (-1, "[invalid_input]"), ("1", "[invalid_input]")])
@pytest.mark.parametrize("model", ["toy", "hplm"])
def test_a_timeout_of_generate_is_read_from_its_parameters(server, model, timeout, word):
    status, said = _generate(server, model, TEXT=WORDS[0], tenant="city", timeout=timeout)
    assert status == 400 and word in said["error"]
    assert _generate(server, model, TEXT=WORDS[0], tenant="city", timeout=60_000_000)[1]["LABEL"]


def _generate(server, model, **body):
    """Returns the status and the answer. Triton turns every error into a 400 there."""
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/{model}/generate", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_deadline_that_cannot_be_met_is_an_error(stock):
    _refused(stock, 503, ["[deadline]", "0.001 ms"], [WORDS[0]], "city", timeout=1)
    assert stock.ask([WORDS[0]], "city", timeout=60_000_000)["LABEL"].shape == (1, 1)


@pytest.mark.parametrize(
    "values, datatype",
    [
        (np.array([[1]], dtype=np.int32), "INT32"),
        (np.array([b"no batch dimension"], dtype=object), "BYTES"),
        (np.array([[b"two", b"columns"]], dtype=object), "BYTES"),
        (np.zeros((0, 1), dtype=object), "BYTES"),
    ],
)
def test_wrong_types_and_shapes_are_refused(stock, values, datatype):
    with pytest.raises(InferenceServerException) as caught:
        stock.client.infer("toy", [stock.tensor("TEXT", values, datatype)], parameters={"tenant": "city"})
    assert caught.value.status() == STATUS[stock.protocol][400], caught.value


def test_pairs_of_another_number_are_refused(stock):
    with pytest.raises(InferenceServerException) as caught:
        stock.ask([WORDS[0]] * 2, "city", pairs=[WORDS[1]])
    assert caught.value.status() == STATUS[stock.protocol][400]


@pytest.mark.parametrize(
    "ticket",
    [
        np.zeros((1, TICKET_BYTES), dtype=np.uint8),
        np.ones((1, 1), dtype=np.uint8),
        np.frombuffer(Ticket(0, 0, 1, 1, 0, 0, 0, 0).sign(b"guess", b""), dtype=np.uint8)[None],
    ],
    ids=["zeros", "short", "forged"],
)
def test_upper_refuses_requests_without_a_ticket_of_lookup(stock, ticket):
    inputs = [stock.tensor("TICKET", ticket, "UINT8")]
    with pytest.raises(InferenceServerException) as caught:
        stock.client.infer("toy-upper", inputs, parameters={"tenant": "city", "ticket": "please", "authorization": "Bearer x"})
    assert caught.value.status() == STATUS[stock.protocol][404] and "[no_tenant]" in caught.value.message()


def test_a_probe_is_answered_without_a_tenant_and_not_counted(stock, server):
    before = settled(server, {})
    text = stock.tensor("TEXT", np.array([[b""]], dtype=object))
    for model in ("toy", "hplm"):
        answer = stock.client.infer(model, [text], parameters={"hplm_probe": True})
        assert answer.as_numpy("LABEL").tolist() == [[b"ok"]]
    stock.ask([WORDS[0]], "city")
    settled(server, {"hplm_requests_total": 1, "hplm_lookup_requests_total": 1}, before)


def test_a_ticket_is_valid_only_unchanged(server):
    """It says which rows are read. A tenant's own ticket must not open the rows of another domain."""
    stock = Stock(server, "grpc")
    text = stock.tensor("TEXT", np.array([[WORDS[0].encode()]], dtype=object))
    ticket = stock.client.infer("toy-lookup", [text], parameters={"tenant": "beta"}).as_numpy("TICKET")

    def upper(ticket):
        return stock.client.infer("toy-upper", [stock.tensor("TICKET", ticket, "UINT8")])

    assert upper(ticket).as_numpy("LABEL").shape == (1, 1)
    for place in range(0, ticket.shape[1], 7):
        forged = ticket.copy()
        forged[0, place] ^= 1
        with pytest.raises(InferenceServerException, match=mentioning("[no_tenant]")):
            upper(forged)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"inputs": 7}', b'{"inputs": []}', b"\xff" * 1000])
def test_bodies_that_are_not_a_request_are_refused(server, body):
    """Triton itself refuses them with 400, or with 500 if it cannot parse them at all."""
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/toy/infer", data=body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code in (400, 500) and json.loads(caught.value.read())["error"]
    assert Stock(server, "http").ask([WORDS[0]], "city")["LABEL"].shape == (1, 1)


def test_a_repository_of_another_format_is_refused_at_start(toy, tmp_path):
    export(toy.store, tmp_path, ServingOptions())
    config = tmp_path / "toy/1/backbone.json"
    config.write_text(re.sub(r'"format": \d+', '"format": 99', config.read_text()))
    with pytest.raises(HplmError, match=mentioning("backbone.json", 99, 2)):
        TritonServer(tmp_path).start()
