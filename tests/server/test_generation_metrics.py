"""After known traffic of a decoder, `/metrics` has exactly the counts of that traffic."""

import pytest
from tritonclient.utils import InferenceServerException

from hplm.metrics.names import METRICS, OF_DECODERS, SERVER_RESTARTS
from tests.server.generating import GREEDY, Asked
from tests.support.metrics import settled

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

TOKENS = GREEDY["max_tokens"]


def test_counts_and_times_of_answers_are_published(server):
    before = settled(server, {"hplm_running_sequences": 0})
    for tenant, sampling in (("plain", GREEDY), ("plain", {**GREEDY, "n": 2}), ("lora", {**GREEDY, "max_tokens": 1})):
        Asked(server, "words", tenant, sampling, stream=True).pieces()
    with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
        Asked(server, "a", "nobody").piece()
    scraped = settled(server, {"hplm_generations_total": 4, "hplm_running_sequences": 0, "hplm_cache_tokens": 0}, before)
    now = server.metrics()
    assert scraped.of("hplm_generations_total", outcome="length") == 3
    assert scraped.of("hplm_generations_total", outcome="no_tenant") == 1
    assert scraped.of("hplm_generated_tokens_total") == 3 * TOKENS + 1
    assert scraped.of("hplm_prompt_tokens_total") == 3 * len("*words")
    assert now.of("hplm_cache_room_tokens") == 32_768 and now.of("hplm_cache_share") == 0
    known = [set(labels) for name, labels in scraped.series if name == "hplm_adapters_info"]
    running = {("max_lora", "8"), ("running_lora_adapters", "lora"), ("waiting_lora_adapters", "")}
    assert any(running <= labels for labels in known), known
    for name, count in (("hplm_first_token_seconds", 3), ("hplm_token_seconds", 3 * (TOKENS - 1))):
        assert scraped.of(f"{name}_count") == scraped.of(f"{name}_bucket", le="+Inf") == count
        buckets = [value for (found, _), value in scraped.series.items() if found == f"{name}_bucket"]
        assert len(buckets) > 10 and max(buckets) == count and scraped.of(f"{name}_sum") > 0
    shown = {name for name, own in scraped.series if ("backbone", "chat") in own}
    assert shown == {metric.name for metric in METRICS if metric in OF_DECODERS} | {
        SERVER_RESTARTS.name,
        "hplm_model_restarts_total",
    }
