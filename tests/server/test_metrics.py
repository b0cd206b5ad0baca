"""After known traffic, `/metrics` has exactly the counts of that traffic."""

import contextlib
import json
from collections import Counter

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.metrics.names import ACROSS_TEXTS, LEVEL_TEXTS, METRICS, OF_COPIES, OF_DECODERS
from hplm.server import TritonServer
from testing.toy import WORDS
from tests.server.stock import Stock
from tests.support.metrics import settled
from tests.support.servers import serving

pytestmark = pytest.mark.slow

OF_CASCADES = {LEVEL_TEXTS, ACROSS_TEXTS}  # the toy's tenants have none
OF_ENCODERS = {metric.name for metric in METRICS if metric not in OF_DECODERS | OF_CASCADES | OF_COPIES}


def test_counts_equal_the_sent_requests(toy):
    with serving(toy.repository) as server:
        stock = Stock(server, "grpc")
        sent, texts, tokens = Counter(), 0, 0
        for number, (tenant, several) in enumerate([("acme", 1), ("beta", 3), ("city", 2), ("acme", 4)] * 3):
            stock.ask([" ".join(WORDS[: 3 + i]) for i in range(several)], tenant, timeout=60_000_000 if number % 2 else None)
            sent[tenant] += 1
            texts += several
            tokens += sum(5 + i for i in range(several))
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            stock.ask([WORDS[0]], "nobody")
        with pytest.raises(InferenceServerException, match=r"\[deadline\]"):
            stock.ask([WORDS[0]], "beta", timeout=1)
        with pytest.raises(InferenceServerException, match=r"\[invalid_input\]"):
            stock.ask([WORDS[0]] * 2, "beta", top_k=-1)
        scraped = settled(server, {"hplm_lookup_requests_total": 15, "hplm_requests_total": 12})
    lookups, requests = "hplm_lookup_requests_total", "hplm_requests_total"
    assert scraped.of(lookups, outcome="passed_on") == 12
    for outcome in ("no_tenant", "invalid_input", "deadline"):
        assert scraped.of(lookups, outcome=outcome) == 1
    assert scraped.of(lookups) == 15
    assert scraped.of(requests, outcome="answered") == scraped.of(requests, outcome="on_time") == 6
    assert scraped.of(requests) == 12
    for tenant, count in sent.items():
        assert scraped.of("hplm_tenant_requests_total", tenant=tenant) == count
    assert scraped.of("hplm_batch_texts_total") == scraped.of("hplm_wait_seconds_count") == texts
    assert scraped.of("hplm_batch_tokens_total") == tokens
    assert scraped.of("hplm_batch_padding_total") == 0
    assert 0 < scraped.of("hplm_batches_total") <= 12
    assert scraped.of("hplm_wait_seconds_bucket", le="+Inf") == texts
    assert scraped.of("hplm_slack_seconds_count") == sum([3, 4] * 3)
    assert scraped.of("hplm_deadline_seconds_count") == 6 and 300 < scraped.of("hplm_deadline_seconds_sum") <= 360
    assert scraped.of("hplm_slot_misses_total") == scraped.of("hplm_slots_used") > 0
    assert scraped.of("hplm_slot_hits_total") + scraped.of("hplm_slot_misses_total") >= 2 * 12
    assert scraped.of("hplm_plot_windows_total") == tokens  # one window a token
    terms = ("batch", "token", "text", "adapter")  # a fitted term may be 0, their sum may not
    assert sum(scraped.of("hplm_cost_seconds", term=term) for term in terms) > 0
    assert {stage for (name, own), _ in scraped.series.items() if name == "hplm_stage_seconds_total" for key, stage in own
            if key == "stage"} >= {"prepare", "swap", "retrieve", "compute"}  # fmt: skip
    shown = {name for name, _ in scraped.series}
    assert shown == OF_ENCODERS, "nothing is shown that is not documented, or the other way round"


def test_tiny_deadlines_lose_no_series(toy):
    """A batch that starts after a deadline has a negative slack, which no counter takes."""
    sent = 60
    with serving(toy.repository) as server:
        stock = Stock(server, "grpc")
        for number in range(sent):
            with contextlib.suppress(InferenceServerException):
                stock.ask([" ".join(WORDS[:9])], "acme", timeout=500 * (1 + number % 10))
        scraped = settled(server, {"hplm_lookup_requests_total": sent})
    passed_on = scraped.of("hplm_lookup_requests_total", outcome="passed_on")
    assert scraped.of("hplm_requests_total") == passed_on
    assert scraped.of("hplm_tenant_requests_total", tenant="acme") == passed_on
    assert scraped.of("hplm_slack_seconds_count") == scraped.of("hplm_wait_seconds_count")
    assert {name for name, _ in scraped.series} == OF_ENCODERS


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_request_is_found_in_the_journal_by_the_clients_id(toy, tmp_path, protocol):
    journal = tmp_path / "journal.jsonl"
    export(toy.store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256, journal=str(journal)))
    with TritonServer(tmp_path / "repository") as server:
        stock = Stock(server, protocol)
        text = stock.tensor("TEXT", np.array([[" ".join(WORDS[:5]).encode()]], dtype=object))
        stock.client.infer("toy", [text], request_id="ours-17", parameters={"tenant": "acme"})
        stock.client.infer("hplm", [text], request_id="ours-18", parameters={"tenant": "beta"})
    written = journal.read_text("utf-8")
    found = {entry["request"]: entry for entry in map(json.loads, written.splitlines()) if "request" in entry}
    assert {name: entry["tenant"] for name, entry in found.items()} == {"ours-17": "acme", "ours-18": "beta"}
    assert " ".join(WORDS[:5]) not in written
