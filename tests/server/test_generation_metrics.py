"""After known traffic of a decoder, `/metrics` has exactly the counts of that traffic."""

import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.metrics.names import METRICS, OF_DECODERS, SERVER_RESTARTS
from testing.random_store import random_store
from testing.toy import CHAT
from tests.server.generating import GREEDY, Asked
from tests.support.metrics import settled
from tests.support.servers import serving

pytestmark = pytest.mark.slow

PLAIN = TenantFile("plain", 1, "root", 1, "generate", [], 0)
LORA = TenantFile("lora", 1, "root", 1, "generate", [], 4, "lora", ("query", "value"))
TOKENS = GREEDY["max_tokens"]


def test_counts_and_times_of_answers_are_published(tmp_path):
    store = random_store(tmp_path / "store", CHAT, [PLAIN, LORA], corpus_tokens=500, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32", seats=4, cache_tokens=512, admission=False))
    with serving(tmp_path / "repository") as server:
        for tenant, sampling in (("plain", GREEDY), ("plain", {**GREEDY, "n": 2}), ("lora", {**GREEDY, "max_tokens": 1})):
            Asked(server, "words", tenant, sampling, stream=True).pieces()
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            Asked(server, "a", "nobody").piece()
        scraped = settled(server, {"hplm_generations_total": 4, "hplm_running_sequences": 0, "hplm_cache_tokens": 0})
    assert scraped.of("hplm_generations_total", outcome="length") == 3
    assert scraped.of("hplm_generations_total", outcome="no_tenant") == 1
    assert scraped.of("hplm_generated_tokens_total") == 3 * TOKENS + 1
    assert scraped.of("hplm_prompt_tokens_total") == 3 * len("*words")
    assert scraped.of("hplm_cache_room_tokens") == 512 and scraped.of("hplm_cache_share") == 0
    ((_, labels),) = [series for series in scraped.series if series[0] == "hplm_adapters_info"]
    assert {("max_lora", "4"), ("running_lora_adapters", "lora"), ("waiting_lora_adapters", "")} <= set(labels)
    for name, count in (("hplm_first_token_seconds", 3), ("hplm_token_seconds", 3 * (TOKENS - 1))):
        assert scraped.of(f"{name}_count") == scraped.of(f"{name}_bucket", le="+Inf") == count
        buckets = [value for (found, _), value in scraped.series.items() if found == f"{name}_bucket"]
        assert len(buckets) > 10 and max(buckets) == count and scraped.of(f"{name}_sum") > 0
    shown = {name for name, _ in scraped.series}
    assert shown == {metric.name for metric in METRICS if metric in OF_DECODERS} | {
        SERVER_RESTARTS.name,
        "hplm_model_restarts_total",
    }
