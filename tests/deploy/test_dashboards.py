"""Dashboards and alerts name metrics, labels and outcomes that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml

from hplm.errors import BY_WORD
from hplm.metrics.names import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/hplm.json").read_text("utf-8"))
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
SCALING = yaml.safe_load((DEPLOY / "prometheus/scaling.yaml").read_text("utf-8"))["groups"][0]["rules"]
RECORDED = {rule["record"] for rule in SCALING}
EXPRESSIONS = (
    {rule["alert"]: rule["expr"] for rule in RULES}
    | {f"{rule['record']} {rule.get('labels', {}).get('reason', '')}": rule["expr"] for rule in SCALING}
    | {f"{panel['title']} {target['refId']}": target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]}
)
OF_KUBERNETES = {"namespace", "pool"}  # which its PodMonitor adds to all metrics
LABELS = {metric.name: {"backbone", *metric.labels} for metric in METRICS}
# Of Triton, of Prometheus and of the router. `hplm` is a label that we give targets.
OF_OTHERS = {
    "nv_inference_request_success": {"model", "version"}, "up": {"hplm"}, "haproxy_backend_active_servers": {"hplm", "proxy"},
}  # fmt: skip
OUTCOMES = {"answered", "on_time", "late", "passed_on", *BY_WORD}
SELECTOR = re.compile(r"\b((?:hplm|nv|haproxy)_\w+|up)\b(?:\{([^}]*)\})?")
RECORD = re.compile(r"\bhplm:[\w:]+")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_expressions_use_metrics_labels_and_outcomes_that_exist(expression):
    found, recorded = SELECTOR.findall(expression), set(RECORD.findall(expression))
    assert (found or recorded) and recorded <= RECORDED
    for name, matchers in found:
        labels = (LABELS | OF_OTHERS)[name]
        for label, value in MATCHER.findall(matchers):
            assert label in labels, f"{name} has no label {label}"
            if label == "outcome":
                assert set(value.split("|")) <= OUTCOMES, value
    for grouping in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression):
        known = set().union(*((LABELS | OF_OTHERS)[name] for name, _ in found), {"le"}, OF_KUBERNETES)
        assert {label.strip() for label in grouping.split(",")} <= known
    assert expression.count("(") == expression.count(")")


def test_every_alert_is_explained_in_operating_md():
    text = (DEPLOY.parent / "docs/operating.md").read_text("utf-8")
    for rule in RULES:
        assert f"### {rule['alert']}" in text
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_panels_do_not_overlap_and_have_titles():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    assert all(panel["title"] for panel in DASHBOARD["panels"])
