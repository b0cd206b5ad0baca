"""Rules and the dashboard name what exists, and promtool finds the rules valid and firing when they should."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hplm.errors import BY_WORD
from hplm.metrics.names import ALIAS_REQUESTS
from tests.deploy.image import DEPLOY
from tests.deploy.programs import run
from tests.support.metrics import METRICS
from tests.support.needed import debian_program

SERIES = Path(__file__).parent
DASHBOARD = json.loads(subprocess.check_output([sys.executable, DEPLOY / "grafana/dashboard.py"]))
FILE = DEPLOY / "helm/hplm/files/rules.yaml"
RULES, SCALING = (group["rules"] for group in yaml.safe_load(FILE.read_text("utf-8"))["groups"])
RECORDED = {rule["record"] for rule in SCALING}
EXPRESSIONS = (
    {rule["alert"]: rule["expr"] for rule in RULES}
    | {f"{rule['record']} {rule.get('labels', {}).get('reason', '')}": rule["expr"] for rule in SCALING}
    | {
        f"{place} {panel['title']} {target['refId']}": target["expr"]
        for place, panel in enumerate(DASHBOARD["panels"])
        for target in panel["targets"]
    }
)
OF_TARGETS = {"namespace", "pool", "instance"}  # which Kubernetes' PodMonitor and Prometheus add to all metrics
LABELS = {metric.name: {"backbone", "namespace", *metric.labels} for metric in METRICS}
# Of Triton, of Prometheus and of the router. `hplm` is a label that we give targets.
OF_OTHERS = {
    "nv_inference_request_success": {"model", "version"}, "up": {"hplm"}, "haproxy_backend_active_servers": {"hplm", "proxy"},
}  # fmt: skip
OUTCOMES = {"answered", "on_time", "late", "passed_on", "stop", "length", *BY_WORD}
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
        known = set().union(*((LABELS | OF_OTHERS)[name] for name, _ in found), {"le"}, OF_TARGETS)
        assert {label.strip() for label in grouping.split(",")} <= known


def test_the_dashboard_offers_the_model_hplm_and_shows_what_it_refuses():
    _, _, backbones = DASHBOARD["templating"]["list"]
    (_, names), (label, _) = MATCHER.findall(backbones["query"]["query"])
    assert label == "namespace"  # whose values are the choice before it
    assert re.fullmatch(names, ALIAS_REQUESTS.name) and ALIAS_REQUESTS.name in json.dumps(DASHBOARD["panels"])


def for_promtool(test):
    """Returns a test as promtool takes it."""
    series, alerts = test.pop("input_series"), test.pop("alerts", {})
    return test | {
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": time, "alertname": name, "exp_alerts": [exp_alert(name, **one) for one in expected]}
            for time, named in alerts.items()
            for name, expected in named.items()
        ],
    }


def exp_alert(name, says, **labels):
    (severity,) = (rule["labels"]["severity"] for rule in RULES if rule["alert"] == name)
    return {"exp_labels": {"severity": severity, **labels}, "exp_annotations": {"summary": says}}


@pytest.mark.parametrize("file", ["scaling.yaml", pytest.param("alerts.yaml", marks=pytest.mark.slow)])  # hours of alerts
def test_rules_are_valid_and_say_what_the_metrics_mean(tmp_path, file):
    run(debian_program("promtool"), "check", "rules", FILE)
    given = yaml.safe_load((SERIES / file).read_text("utf-8"))
    tests = given | {"rule_files": [str(FILE)], "tests": list(map(for_promtool, given["tests"]))}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests), "utf-8")
    run(debian_program("promtool"), "test", "rules", tmp_path / "tests.yaml")


def test_what_is_scraped_has_the_labels_that_alerts_read():
    run(debian_program("promtool"), "check", "config", DEPLOY / "prometheus.yaml")
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text("utf-8"))
    assert [DEPLOY / file for file in config["rule_files"]] == [FILE]
    assert {one["labels"]["hplm"] for job in config["scrape_configs"] for one in job["static_configs"]} == {"server", "router"}


def test_every_alert_is_seen_firing_and_silent_and_is_explained():
    tests = yaml.safe_load((SERIES / "alerts.yaml").read_text("utf-8"))["tests"]
    seen = {(name, bool(alerts)) for test in tests for named in test["alerts"].values() for name, alerts in named.items()}
    assert seen == {(rule["alert"], fires) for rule in RULES for fires in (True, False)}
    text = (DEPLOY.parent / "docs/operating.md").read_text("utf-8")
    for rule in RULES:
        assert f"### {rule['alert']}" in text and rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
