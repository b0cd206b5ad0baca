"""Rules for Prometheus, by its own checker and its own tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.deploy.image import DEPLOY
from tests.deploy.programs import debian_program, run

RULES = DEPLOY / "prometheus"
SERIES = Path(__file__).parent


@pytest.mark.parametrize("file", ["scaling.yaml", "alerts.yaml"])
def test_rules_are_valid(file):
    run(debian_program("promtool"), "check", "rules", RULES / file)


def test_what_is_scraped_has_the_labels_that_alerts_read():
    run(debian_program("promtool"), "check", "config", RULES / "prometheus.yaml")
    jobs = yaml.safe_load((RULES / "prometheus.yaml").read_text("utf-8"))["scrape_configs"]
    assert {one["labels"]["hplm"] for job in jobs for one in job["static_configs"]} == {"server", "router", "manager"}


def test_every_alert_is_seen_firing_and_silent():
    rules = yaml.safe_load((RULES / "alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
    tests = yaml.safe_load((SERIES / "alerts.yaml").read_text("utf-8"))["tests"]
    seen = {(one["alertname"], bool(one.get("exp_alerts"))) for test in tests for one in test["alert_rule_test"]}
    assert seen == {(rule["alert"], fires) for rule in rules for fires in (True, False)}


@pytest.mark.parametrize("file", ["scaling.yaml", "alerts.yaml"])
def test_rules_say_what_the_metrics_mean(tmp_path, file):
    tests = yaml.safe_load((SERIES / file).read_text("utf-8"))
    tests["rule_files"] = [str(RULES / file)]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests), "utf-8")
    run(debian_program("promtool"), "test", "rules", tmp_path / "tests.yaml")
