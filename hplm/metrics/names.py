"""All metrics of hPLM, as `/metrics` shows them. Each also has the label `backbone`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

COUNTER, GAUGE = "counter", "gauge"


class Metric(NamedTuple):  # which Python itself hashes: a metric is looked up whenever something is counted
    name: str
    kind: str
    description: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Histogram:
    """A histogram of times, made of metrics that are named as Prometheus names its parts.

    Triton's Python models offer only counters and gauges. A counter can only grow, so the sum of signed times is a gauge.
    """

    name: str
    description: str
    bounds: tuple[float, ...] = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    signed: bool = False  # whether times may be below 0
    of: str = "texts"  # what is counted
    labels: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Metric, Metric, Metric]:
        return (
            Metric(
                f"{self.name}_bucket",
                COUNTER,
                f"{self.description}: {self.of} with at most `le` seconds",
                (*self.labels, "le"),
            ),
            Metric(f"{self.name}_sum", GAUGE if self.signed else COUNTER, f"{self.description}: sum in seconds", self.labels),
            Metric(f"{self.name}_count", COUNTER, f"{self.description}: number of {self.of}", self.labels),
        )


LONG_BOUNDS = (*Histogram.bounds, 30.0, 60.0, 300.0)


# Lookup
PASSED_ON = "passed_on"  # an outcome
LOOKUPS = Metric(
    "hplm_lookup_requests_total",
    COUNTER,
    "Requests that reached lookup, by outcome: passed on, or the reason of the refusal",
    ("outcome",),
)
ALIAS_REQUESTS = Metric(
    "hplm_alias_requests_total",
    COUNTER,
    "Requests to the model `hplm`, by outcome: passed on, or the reason of its refusal; the backbone is `hplm`",
    ("outcome",),
)
LOOKUP_SECONDS = Metric("hplm_lookup_seconds_total", COUNTER, "Time that lookup spent on requests")
BEFORE_SECONDS = Histogram(
    "hplm_before_lookup_seconds",
    "Time from a request's arrival, at the front door or at the model `hplm` if it comes through them, until lookup gets it",
    of="requests",
)
WAITING_LOOKUPS = Metric("hplm_waiting_lookups", GAUGE, "Pieces of requests that wait for lookup")
WINDOWS = Metric(
    "hplm_plot_windows_total",
    COUNTER,
    "n-gram windows looked up, by the domain and level where they were found",
    ("domain", "level"),
)

REGISTRY_AGE_SECONDS = Metric(
    "hplm_registry_age_seconds", GAUGE, "Time since the registry of tenants was last seen; only with --state"
)
REGISTRY_GENERATION = Metric(
    "hplm_registry_generation", GAUGE, "Generation of the registry whose keys and deletions hold here; only with --state"
)

# Restarts
SERVER_RESTARTS = Metric("hplm_server_restarts_total", COUNTER, "Times that `hplm serve` started the server again")
MODEL_RESTARTS = Metric(
    "hplm_model_restarts_total", COUNTER, "Times that a dead model process was started again without the server", ("model",)
)

# Upper: requests
ENGINE_RESTARTS = Metric("hplm_engine_restarts_total", COUNTER, "Engines that were started because the one before ended")
LOST_REQUESTS = Metric(
    "hplm_lost_requests_total",
    COUNTER,
    "Requests that an engine had when it ended or could not get, by outcome: crashed (it computed them), draining (it did "
    "not), or why they could not be passed on",
    ("outcome",),
)
SUSPECTED_TENANTS = Metric(
    "hplm_suspected_tenants", GAUGE, "Tenants that run alone, because an engine ended while it computed their requests"
)
QUARANTINED_TENANTS = Metric(
    "hplm_quarantined_tenants", GAUGE, "Tenants whose requests are refused, because an engine ended while it computed only them"
)
REQUESTS = Metric(
    "hplm_requests_total",
    COUNTER,
    "Requests that reached upper, by outcome: answered (no deadline), on_time, late, or the reason of the refusal; the domain "
    "'' stands for tickets that upper did not take",
    ("domain", "outcome"),
)
ANSWER_SECONDS = Histogram(
    "hplm_answer_seconds",
    "Time from a request's arrival, at the front door if it comes through one, until its answer or error is sent, by outcome",
    bounds=LONG_BOUNDS,
    of="requests that reached upper or a decoder",
    labels=("outcome",),
)
TENANT_REQUESTS = Metric(
    "hplm_tenant_requests_total",
    COUNTER,
    "Requests of the busiest tenants, by outcome; the tenant '' stands for all others",
    ("tenant", "outcome"),
)
EXIT_TEXTS = Metric(
    "hplm_exit_texts_total",
    COUNTER,
    "Answered texts of tenants with exits, by the exit where they left; `end`: none",
    ("exit",),
)
EXIT_AGREEMENT = Metric(
    "hplm_exit_agreement",
    GAUGE,
    "Share of audited texts that have the full stack's answer at an exit where they could have left",
    ("tenant", "exit"),
)
RAISED_EXITS = Metric(
    "hplm_raised_exits", GAUGE, "Exits with a raised threshold: fewer texts than promised had the right answer"
)
GOVERNOR_RUNG = Metric(
    "hplm_governor_rung", GAUGE, "The rung of tenants that ask for more than their fair share; 1: the dearest"
)
WAITING_TEXTS = Metric("hplm_waiting_texts", GAUGE, "Texts that wait for a batch")
OLDEST_TEXT_SECONDS = Metric("hplm_oldest_text_seconds", GAUGE, "Time since the oldest text that waits for a batch arrived")
WAITING_BYTES = Metric("hplm_waiting_bytes", GAUGE, "Memory that waiting texts keep")
WAIT_SECONDS = Histogram("hplm_wait_seconds", "Time from a text's arrival until its batch starts to compute")
SLACK_SECONDS = Histogram(
    "hplm_slack_seconds",
    "Time left until a text's deadline when its batch starts to compute; below 0 if the batch starts too late",
    signed=True,
)
DEADLINE_SECONDS = Histogram(
    "hplm_deadline_seconds", "Time from a request's arrival until its deadline, whether it was answered or not", of="requests"
)

# Upper: batches
BATCHES = Metric("hplm_batches_total", COUNTER, "Batches computed")
BATCH_TEXTS = Metric("hplm_batch_texts_total", COUNTER, "Texts in computed batches")
BATCH_TOKENS = Metric("hplm_batch_tokens_total", COUNTER, "Tokens in computed batches, without padding")
BATCH_PADDING = Metric("hplm_batch_padding_total", COUNTER, "Padding tokens in computed batches")
STAGE_SECONDS = Metric(
    "hplm_stage_seconds_total", COUNTER, "Time that the engine's threads spent in each stage of a batch", ("stage",)
)
COST_SECONDS = Metric(
    "hplm_cost_seconds", GAUGE, "Predicted time of a batch by term: per batch, token, text and adapter to load", ("term",)
)
SLOT_HITS = Metric("hplm_slot_hits_total", COUNTER, "Adapters and heads that were already on the device", ("layout",))
SLOT_MISSES = Metric("hplm_slot_misses_total", COUNTER, "Adapters and heads that had to be copied to the device", ("layout",))
SLOTS_USED = Metric("hplm_slots_used", GAUGE, "Adapters and heads on the device", ("layout",))

# Generation
GENERATIONS = Metric(
    "hplm_generations_total",
    COUNTER,
    "Requests for generated text, by outcome: why the answer ended, or the reason of the refusal",
    ("outcome",),
)
PROMISED = Metric("hplm_promised_generations_total", COUNTER, "Requests for generated text with a deadline")
PROMPT_TOKENS = Metric("hplm_prompt_tokens_total", COUNTER, "Tokens of the prompts of ended answers")
GENERATED_TOKENS = Metric("hplm_generated_tokens_total", COUNTER, "Tokens of ended answers")
RUNNING_SEQUENCES = Metric("hplm_running_sequences", GAUGE, "Answers that grow")
WAITING_SEQUENCES = Metric("hplm_waiting_sequences", GAUGE, "Answers that have not started")
CACHE_TOKENS = Metric("hplm_cache_tokens", GAUGE, "Tokens whose room in the cache of keys and values is taken")
CACHE_ROOM = Metric("hplm_cache_room_tokens", GAUGE, "Tokens for which the cache of keys and values has room, taken or free")
CACHE_SHARE = Metric("hplm_cache_share", GAUGE, "Part of the cache of keys and values that is taken, from 0 to 1")
MISSING_WINDOWS = Metric(
    "hplm_missing_windows_total",
    COUNTER,
    "Windows of a decoder's tokens that no table has, by where their rows came from: computed, or kept since an earlier token",
    ("row",),
)
PUT_BACK = Metric("hplm_put_back_total", COUNTER, "Answers that had to wait again because the cache was full")
FIRST_TOKEN_SECONDS = Histogram(
    "hplm_first_token_seconds",
    "Time from a request's arrival until its first token is chosen",
    bounds=LONG_BOUNDS,
    of="requests",
)
TOKEN_SECONDS = Histogram("hplm_token_seconds", "Time between two tokens of an answer", of="tokens")
