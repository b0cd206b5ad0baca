"""Prints the dashboard of hPLM on Triton: python deploy/grafana/dashboard.py >deploy/helm/hplm/files/dashboard.json"""

from __future__ import annotations

import json
from typing import Any

CHOSEN = 'backbone=~"$backbone",namespace=~"$namespace"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """Returns the summed rate of a counter of the chosen backbones. `labels`: further conditions, each behind a comma."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{{{CHOSEN}{labels}}}[$__rate_interval]))"


def now(metric: str, labels: str = "") -> str:
    """Returns the newest value of a gauge."""
    return f"{metric}{{{CHOSEN}{labels}}}"


def quantiles(metric: str, *shares: float, labels: str = "") -> dict[str, str]:
    """Returns a line for each quantile of a histogram."""
    buckets = rate(f"{metric}_bucket", labels, "le")
    return {f"p{share * 100:g}": f"histogram_quantile({share}, {buckets})" for share in shares}


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def cost(term: str) -> str:
    return now("hplm_cost_seconds", f',term="{term}"')


BAD = ',outcome!~"answered|on_time"'
OURS = '{__name__=~"hplm_(batches|generations|alias_requests)_total"}'
NOT_PASSED_ON = ',outcome!="passed_on"'
SERVER = "{{backbone}} {{instance}}"
ALL_SLOTS = f"({rate('hplm_slot_hits_total', by='layout')} + {rate('hplm_slot_misses_total', by='layout')})"
ONE_TEXT = f"{cost('batch')} + 128 * on(backbone, instance) {cost('token')} + on(backbone, instance) {cost('text')}"

# fmt: off
# Title (a * behind it: the lines are stacked), unit, explanation, and a query for each line's name.
PANELS: list[tuple[str, str, str, dict[str, str]]] = [
    ("Requests by outcome*", "reqps", "answered: a request without a deadline. on_time, late: a request with one. All others: "
     "the reason of a refusal or an error.", {"{{outcome}}": rate("hplm_requests_total", by="outcome")}),
    ("Time to answer", "s", "Time of an answered request from its arrival, at the front door if it comes through one, until "
     "its answer is sent.", quantiles("hplm_answer_seconds", 0.5, 0.99, labels=',outcome=~"answered|on_time|late"')),
    ("On-time share", "percentunit", "Of the requests with a deadline that reached the engine, the share answered in time.",
     {"on time": ratio(rate("hplm_requests_total", ',outcome="on_time"'),
                       rate("hplm_requests_total", ',outcome=~"on_time|late|deadline"'))}),
    ("Refused by lookup*", "reqps", "Requests refused before anything was computed: unknown tenants, wrong keys, invalid "
     "input, quotas. hplm: by the model hplm.",
     {"{{outcome}}": rate("hplm_lookup_requests_total", NOT_PASSED_ON, "outcome"),
      "hplm {{outcome}}": rate("hplm_alias_requests_total", NOT_PASSED_ON, "outcome")}),
    ("Waiting time", "s", "Time of a text from its arrival until its batch starts to compute.",
     quantiles("hplm_wait_seconds", 0.5, 0.9, 0.99)),
    ("Slack when the batch starts", "s", "Time left until a text's deadline when its batch starts to compute. Near zero, "
     "deadlines are about to be missed.", quantiles("hplm_slack_seconds", 0.01, 0.1, 0.5)),
    ("Texts waiting", "short", "Texts in the queue of the engine.", {SERVER: now("hplm_waiting_texts")}),
    ("Age of the oldest waiting text", "s", "A text that others overtake grows old although texts are computed.",
     {SERVER: now("hplm_oldest_text_seconds")}),
    ("Memory of waiting texts", "bytes", "The parameter queue_mb limits it.", {SERVER: now("hplm_waiting_bytes")}),
    ("Tokens computed*", "short", "Padding is computed and thrown away.",
     {"tokens": rate("hplm_batch_tokens_total"), "padding": rate("hplm_batch_padding_total")}),
    ("Texts per batch", "short", "", {"texts": ratio(rate("hplm_batch_texts_total"), rate("hplm_batches_total"))}),
    ("Engine threads by stage", "percentunit", "Each stage's share of one thread's time. The stages prepare, swap and retrieve "
     "run beside compute.", {"{{stage}}": rate("hplm_stage_seconds_total", by="stage")}),
    ("Lookup time", "s", "", {"mean": ratio(rate("hplm_lookup_seconds_total"), rate("hplm_lookup_requests_total"))}),
    ("n-gram windows by where they were found*", "short", "In the domain's own table, in a parent's, or only as a shorter "
     "n-gram.", {"{{domain}} {{level}}": rate("hplm_plot_windows_total", by="domain, level")}),
    ("Share of adapters found on the device", "percentunit", "The others are copied from host memory while the batch before "
     "computes.", {"{{layout}}": ratio(rate("hplm_slot_hits_total", by="layout"), ALL_SLOTS)}),
    ("Slots in use", "short", "", {"{{layout}}": now("hplm_slots_used")}),
    ("Busiest tenants", "reqps", "The tenant '' stands for all other tenants.",
     {"{{tenant}}": f"topk(20, {rate('hplm_tenant_requests_total', by='tenant')})"}),
    ("Tenants with refused or late requests", "reqps", "", {"{{tenant}} {{outcome}}":
     f"topk(10, {rate('hplm_tenant_requests_total', BAD, 'tenant, outcome')})"}),
    ("Predicted batch time", "s", "Time that the cost model predicts for a batch of one text of 128 tokens, and for loading an "
     "adapter.", {"one text of 128 tokens": ONE_TEXT, "an adapter": cost("adapter")}),
    ("Triton's own count of requests", "reqps", "Triton counts an answer that is sent later as a success, even if it is an "
     "error. Read refusals in the panels above.",
     {"{{model}}": "sum by (model) (rate(nv_inference_request_success[$__rate_interval]))"}),
    ("Time since the registry was seen", "s", "Above the lease, tenants with keys are refused.",
     {SERVER: now("hplm_registry_age_seconds")}),
    ("Exits: where texts left", "short", "Answered texts of tenants with exits. Exit 0 is before all upper layers; end: behind "
     "all of them.", {"exit {{exit}}": rate("hplm_exit_texts_total", by="exit")}),
    ("Exits: least agreement of audited texts", "percentunit", "Of the texts that could leave, the share that has the full "
     "stack's answer, at the worst tenant of each exit.",
     {"exit {{exit}}": f"min by (exit) ({now('hplm_exit_agreement')})"}),
    ("Decoders: requests by outcome*", "reqps", "stop, length, deadline, cancelled: why an answer ended. All others: the "
     "reason of a refusal or an error.", {"{{outcome}}": rate("hplm_generations_total", by="outcome")}),
    ("Decoders: time to first token", "s", "Time from a request's arrival until its first token is chosen.",
     quantiles("hplm_first_token_seconds", 0.5, 0.9, 0.99)),
    ("Decoders: time to whole answer", "s", "Time from a request's arrival until the last token of its answer is sent.",
     quantiles("hplm_answer_seconds", 0.5, 0.99, labels=',outcome=~"stop|length"')),
    ("Decoders: time per token", "s", "Time between two tokens of an answer.",
     quantiles("hplm_token_seconds", 0.5, 0.9, 0.99)),
    ("Decoders: tokens of ended answers", "short", "Tokens a second, of prompts and of answers.",
     {"prompts": rate("hplm_prompt_tokens_total"), "answers": rate("hplm_generated_tokens_total")}),
    ("Decoders: answers that grow and that wait", "short", "Answers that wait have not started: the seats or the cache are "
     "full.", {f"{SERVER} grow": now("hplm_running_sequences"), f"{SERVER} wait": now("hplm_waiting_sequences")}),
    ("Decoders: share of the cache in use", "percentunit", "Room for keys and values that is taken. If it is full, answers "
     "wait or are put back: raise cache_tokens.", {SERVER: ratio(now("hplm_cache_tokens"), now("hplm_cache_room_tokens"))}),
    ("Decoders: answers put back", "short", "Answers that had to wait again because the cache was full. They are computed "
     "anew.", {"{{backbone}}": rate("hplm_put_back_total", by="backbone")}),
]
# fmt: on


def panel(number: int, title: str, unit: str, explanation: str, lines: dict[str, str]) -> dict[str, Any]:
    """Returns a panel, three of which stand in a row."""
    stacked = title.endswith("*")
    custom = {"stacking": {"mode": "normal" if stacked else "none"}, "fillOpacity": 20 if stacked else 0}
    queries = enumerate(lines.items())
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title.rstrip("*"),
        "description": explanation,
        "gridPos": {"x": number % 3 * 8, "y": number // 3 * 7, "w": 8, "h": 7},
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [{"refId": chr(65 + index), "expr": query, "legendFormat": name} for index, (name, query) in queries],
    }


def variable(label: str, series: str) -> dict[str, Any]:
    """Returns a choice among the values that a label has in these series. All: also series without the label."""
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({series}, {label})", "refId": label},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    variables = [variable("namespace", OURS), variable("backbone", OURS.replace("}", ',namespace=~"$namespace"}'))]
    return {
        "uid": "hplm",
        "title": "hPLM on Triton",
        "tags": ["hplm", "triton"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, *variables]},
        "panels": [panel(number, *row) for number, row in enumerate(PANELS)],
    }


if __name__ == "__main__":
    whole = dashboard()
    panels = ",\n".join(json.dumps(one) for one in whole.pop("panels"))  # a line each
    print(f'{json.dumps(whole)[:-1]}, "panels": [\n{panels}\n]}}')
