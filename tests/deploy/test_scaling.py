"""Rules for Prometheus, by its own checker and its own tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.deploy.image import DEPLOY
from tests.deploy.programs import debian_program, run

RULES = DEPLOY / "prometheus"
SERIES = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(RULES.glob("*.yaml")), ids=lambda file: file.name)
def test_rules_are_valid(file):
    run(debian_program("promtool"), "check", "rules", file)


@pytest.mark.parametrize("file", ["scaling.yaml", "alerts.yaml"])
def test_rules_say_what_the_metrics_mean(tmp_path, file):
    tests = yaml.safe_load((SERIES / file).read_text("utf-8"))
    tests["rule_files"] = [str(RULES / file)]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests), "utf-8")
    run(debian_program("promtool"), "test", "rules", tmp_path / "tests.yaml")
