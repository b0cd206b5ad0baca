"""A real server counts its requests in `/metrics`, and writes them into our journal and Triton's trace."""

import json
import re
from collections import Counter

import pytest
import tritonclient.http

from hplm.metrics.names import ALIAS_REQUESTS, REGISTRY_AGE_SECONDS
from testing.toy import WORDS
from tests.server.stock import LIBRARIES, refused
from tests.support.metrics import METRICS, OF_DECODERS, Scraped, settled
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

OF_EXITS = {"hplm_exit_agreement", "hplm_exit_texts_total"}  # only tenants with exits have them, once they are asked
OF_OTHERS = {*OF_DECODERS, ALIAS_REQUESTS, REGISTRY_AGE_SECONDS}
OF_ENCODERS = {metric.name for metric in METRICS if metric not in OF_OTHERS} - OF_EXITS


def test_counts_equal_the_sent_requests(server):
    before, stock, fresh = settled(server, {}), server.stock("grpc"), server.tenant().id
    sent, texts, tokens = Counter(), 0, 0
    for number, (tenant, several) in enumerate([("acme", 1), ("beta", 3), (fresh, 2), ("acme", 4)] * 3):
        stock.ask([" ".join(WORDS[: 3 + i]) for i in range(several)], tenant, timeout=60_000_000 if number % 2 else None)
        sent[tenant] += 1
        texts += several
        tokens += sum(5 + i for i in range(several))
    with refused("no_tenant"):
        stock.ask([WORDS[0]], "nobody")
    with refused("deadline"):
        stock.ask([WORDS[0]], "beta", timeout=1)
    with refused("invalid_input"):
        stock.ask([WORDS[0]] * 2, "beta", top_k=-1)
    counts = {"hplm_lookup_requests_total": 15, "hplm_requests_total": 12, "hplm_batch_texts_total": texts}
    counts |= {"hplm_batch_tokens_total": tokens, "hplm_batch_padding_total": 0, "hplm_plot_windows_total": tokens}
    counts |= {"hplm_wait_seconds_count": texts, "hplm_slack_seconds_count": sum([3, 4] * 3), "hplm_deadline_seconds_count": 6}
    counts |= {"hplm_answer_seconds_count": 12}
    scraped = settled(server, counts, before)
    for outcome, count in (("passed_on", 12), ("no_tenant", 1), ("invalid_input", 1), ("deadline", 1)):
        assert scraped.of("hplm_lookup_requests_total", outcome=outcome) == count
    for outcome in ("answered", "on_time"):
        assert scraped.of("hplm_requests_total", outcome=outcome) == 6
        assert scraped.of("hplm_answer_seconds_bucket", outcome=outcome, le="+Inf") == 6
        assert 0 < scraped.of("hplm_answer_seconds_sum", outcome=outcome) < 360
    for tenant, count in sent.items():
        assert scraped.of("hplm_tenant_requests_total", tenant=tenant) == count
    assert 0 < scraped.of("hplm_batches_total") <= 12
    assert scraped.of("hplm_wait_seconds_bucket", le="+Inf") == texts
    assert 300 < scraped.of("hplm_deadline_seconds_sum") < 360.001
    assert scraped.of("hplm_slot_misses_total") > 0 < Scraped(server).of("hplm_slots_used")
    assert scraped.of("hplm_slot_hits_total") + scraped.of("hplm_slot_misses_total") >= 2 * 12
    terms = ("batch", "token", "text", "adapter")  # a fitted term may be 0, their sum may not
    assert sum(Scraped(server).of("hplm_cost_seconds", term=term) for term in terms) > 0
    assert {stage for (name, own), _ in scraped.series.items() if name == "hplm_stage_seconds_total" for key, stage in own
            if key == "stage"} >= {"prepare", "swap", "retrieve", "compute"}  # fmt: skip
    shown = {name for name, own in scraped.series if ("backbone", "toy") in own}
    assert shown - OF_EXITS == OF_ENCODERS, "nothing is shown that is not documented, or the other way round"


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_a_request_is_in_the_journal_and_in_triton_s_trace(server, protocol):
    stock, names = server.stock(protocol), {f"ours-{protocol}-17": "acme", f"ours-{protocol}-18": "beta"}
    text = stock.tensor("TEXT", " ".join(WORDS[:5]))
    admin = dict([server.server.admin_header])
    with tritonclient.http.InferenceServerClient(server.http_url) as client:
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}, headers=admin)
        try:
            for (name, tenant), model in zip(names.items(), ("toy", "hplm"), strict=True):
                stock.client.infer(model, [text], request_id=name, parameters={"tenant": tenant})
        finally:
            client.update_trace_settings(settings={"trace_level": ["OFF"]}, headers=admin)
    journal = server.folder / "journal.jsonl"

    def written():
        """Returns the tenant and the outcome of each request in the journal. Its last line may be half written."""
        *lines, _ = journal.read_text("utf-8").split("\n")
        entries = [json.loads(line) for line in lines]
        return {entry["request"]: (entry["tenant"], entry["outcome"]) for entry in entries if entry.get("request") in names}

    eventually(lambda: written() == {name: (tenant, "answered") for name, tenant in names.items()})
    assert " ".join(WORDS[:5]) not in journal.read_text("utf-8")
    eventually(lambda: _traced(server, next(iter(names))) == {"toy", "toy-lookup", "toy-upper"})


def _traced(server, request):
    """Returns the models that Triton has traced for a request. It may write after the client has its answer."""
    written = "".join(file.read_text("utf-8") for file in server.folder.glob("trace.json.*"))
    return set(re.findall(rf'"model_name":"([^"]+)"[^{{}}]*"request_id":"{request}"', written))
