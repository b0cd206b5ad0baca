"""Every metric of ours, as `/metrics` shows it. All carry the label `backbone` as well."""

from __future__ import annotations

from dataclasses import dataclass

COUNTER, GAUGE = "counter", "gauge"


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str
    description: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Histogram:
    """Times. Triton's Python models know counters and gauges: a histogram is counters, named as Prometheus names its parts."""

    name: str
    description: str
    bounds: tuple[float, ...] = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

    @property
    def parts(self) -> tuple[Metric, Metric, Metric]:
        return (
            Metric(f"{self.name}_bucket", COUNTER, f"{self.description}: at most so many seconds", ("le",)),
            Metric(f"{self.name}_sum", COUNTER, f"{self.description}: seconds in all"),
            Metric(f"{self.name}_count", COUNTER, f"{self.description}: how many"),
        )


# Lookup
LOOKUPS = Metric(
    "hplm_lookup_requests_total",
    COUNTER,
    "Requests that lookup has seen, by what became of them there: passed on, or the reason why not",
    ("outcome",),
)
LOOKUP_SECONDS = Metric("hplm_lookup_seconds_total", COUNTER, "Time spent looking requests up")
WINDOWS = Metric("hplm_plot_windows_total", COUNTER, "n-gram windows looked up, by where they were found", ("domain", "level"))

# Upper: requests
REQUESTS = Metric(
    "hplm_requests_total",
    COUNTER,
    "Requests that came to the engine, by outcome: answered (no deadline), on_time, late, or the reason of the refusal",
    ("domain", "outcome"),
)
TENANT_REQUESTS = Metric(
    "hplm_tenant_requests_total",
    COUNTER,
    "The same for the tenants that ask most; the tenant '' stands for all the others",
    ("tenant", "outcome"),
)
WAITING_TEXTS = Metric("hplm_waiting_texts", GAUGE, "Texts that wait for their batch")
WAITING_BYTES = Metric("hplm_waiting_bytes", GAUGE, "Memory that waiting texts keep")
WAIT_SECONDS = Histogram("hplm_wait_seconds", "Time of a text from its arrival until its batch starts to compute")
SLACK_SECONDS = Histogram("hplm_slack_seconds", "Time left until its deadline when a text's batch starts to compute")

# Upper: batches
BATCHES = Metric("hplm_batches_total", COUNTER, "Batches computed")
BATCH_TEXTS = Metric("hplm_batch_texts_total", COUNTER, "Texts in them")
BATCH_TOKENS = Metric("hplm_batch_tokens_total", COUNTER, "Tokens in them, padding left out")
BATCH_PADDING = Metric("hplm_batch_padding_total", COUNTER, "Tokens of padding that were computed with them")
STAGE_SECONDS = Metric(
    "hplm_stage_seconds_total", COUNTER, "Time that the engine's threads spent at each stage of batches", ("stage",)
)
COST_SECONDS = Metric(
    "hplm_cost_seconds", GAUGE, "What admission believes a batch takes: for itself, a token, a text, an adapter", ("term",)
)
SLOT_HITS = Metric("hplm_slot_hits_total", COUNTER, "Adapters and heads that lay on the device already", ("layout",))
SLOT_MISSES = Metric("hplm_slot_misses_total", COUNTER, "Adapters and heads that had to be brought", ("layout",))
SLOTS_USED = Metric("hplm_slots_used", GAUGE, "Adapters and heads on the device", ("layout",))

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric)) + tuple(
    part for value in globals().values() if isinstance(value, Histogram) for part in value.parts
)
