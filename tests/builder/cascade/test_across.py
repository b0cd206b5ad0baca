"""`hplm cascade across` and `unlink`, on tenants of two toy backbones with random weights."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from builder.publish.export import export
from builder.store.levels import remove_ladder
from builder.store.links import link_of
from hplm.cli.main import main
from hplm.engine.backbone import Backbone
from hplm.engine.engine import resolve_precision
from hplm.tasks import softmax
from testing.reference import Reference
from testing.toy import random_text
from tests.ladders import STACK
from tests.links import FAR, OPTIONS, make_linked
from tests.support.message import mentions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_candidates", "steady_times")]

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)
TEXTS = 120


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_command_makes_a_link_that_is_exported(tmp_path, capsys):
    """The labels are drawn from the larger tenant's logits, so that it is right most often."""
    made = make_linked(tmp_path)
    near, far, texts = made.near, made.far, tmp_path / "texts.jsonl"
    remove_ladder(near, near.tenant("pair"))
    reference, rng = Reference.open(made.model(far)), np.random.default_rng(0)
    with texts.open("w") as file:
        for number in range(TEXTS):
            text, pair = random_text(random.Random(number), 12), random_text(random.Random(-number - 1), 8)
            shares = softmax(reference.forward(text, "pair", pair).numpy().astype(np.float64))[0]
            label = ["no", "yes"][rng.choice(2, p=shares / shares.sum())]
            file.write(json.dumps({"text": text, "text_pair": pair, "label": label}) + "\n")
    command = ["cascade", "across", "--store", near.folder, "--id", "pair", "--to", far.folder]
    command += ["--texts", texts, "--dtype", "fp32", "--drop", "100"]
    report = run(capsys, *command)
    link = link_of(near, near.tenant("pair"))
    assert link is not None and (link.backbone, link.tenant, link.version) == (FAR, "pair", 1)
    assert link.plan.steps[-1].level == 2 and len(link.plan.steps) > 1
    assert [level["name"] for level in report["levels"]] == [STACK, "own", f"{FAR}/pair"]
    assert report["levels"][2]["score"] > report["levels"][0]["score"]
    assert (report["texts"], report["metric"], report["changed"]) == (TEXTS, "accuracy", True)
    assert mentions(report["plan"]["plan"], f"{FAR}/pair")
    assert not run(capsys, *command)["changed"]
    export(near, tmp_path / "exported", OPTIONS)
    assert Backbone(tmp_path / "exported/toy/1").view.snapshot.find("pair").link == link
    assert run(capsys, "cascade", "unlink", "--store", near.folder, "--id", "pair")["changed"]
    assert link_of(near, near.tenant("pair")) is None
    assert not run(capsys, "cascade", "unlink", "--store", near.folder, "--id", "pair")["changed"]
