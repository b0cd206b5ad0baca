"""After known traffic, `/metrics` has exactly the counts of that traffic."""

from collections import Counter

import pytest

from hplm.metrics.names import METRICS, OF_DECODERS, OF_STATES
from testing.toy import WORDS
from tests.server.stock import refused
from tests.support.metrics import settled

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

OF_EXITS = {"hplm_exit_agreement", "hplm_exit_texts_total"}  # only tenants with exits have them, once they are asked
OF_ENCODERS = {metric.name for metric in METRICS if metric not in OF_DECODERS | OF_STATES} - OF_EXITS


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
    scraped = settled(server, {"hplm_lookup_requests_total": 15, "hplm_requests_total": 12}, before)
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
    assert scraped.of("hplm_slot_misses_total") > 0 < server.metrics().of("hplm_slots_used")
    assert scraped.of("hplm_slot_hits_total") + scraped.of("hplm_slot_misses_total") >= 2 * 12
    assert scraped.of("hplm_plot_windows_total") == tokens  # one window a token
    terms = ("batch", "token", "text", "adapter")  # a fitted term may be 0, their sum may not
    assert sum(server.metrics().of("hplm_cost_seconds", term=term) for term in terms) > 0
    assert {stage for (name, own), _ in scraped.series.items() if name == "hplm_stage_seconds_total" for key, stage in own
            if key == "stage"} >= {"prepare", "swap", "retrieve", "compute"}  # fmt: skip
    shown = {name for name, own in scraped.series if ("backbone", "toy") in own}
    assert shown - OF_EXITS == OF_ENCODERS, "nothing is shown that is not documented, or the other way round"
