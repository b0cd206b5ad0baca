"""`hplm cascade across` and `unlink`, on tenants of two toy backbones with random weights."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.cascade.across import Side, link_tenants
from builder.cascade.candidates import tried
from builder.cascade.selection import Target
from builder.publish.export import export
from builder.store.calibrations import Calibrated, calibration_of, save_calibrated
from builder.store.levels import remove_ladder
from builder.store.links import link_of, save_link
from builder.store.store import Store
from hplm.cli.main import main
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine, resolve_precision
from hplm.engine.lookup import Lookup
from hplm.errors import Broken
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from hplm.tasks import softmax
from hplm.tenants.link import Link
from testing.random_store import random_level, random_tenant
from testing.reference import Reference
from testing.toy import random_text
from tests.builder.cascade.measured import steady_seconds
from tests.ladders import STACK
from tests.links import FAR, OPTIONS, Crossing, make_linked
from tests.support.message import mentioning, mentions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_candidates", "steady_times")]

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)
TEXTS = 120


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_linked(tmp_path_factory.mktemp("linked"))


@pytest.fixture
def stores(made, tmp_path):
    """Returns copies of both stores, without a link of `pair`."""
    near, far = (Store(shutil.copytree(store.folder, tmp_path / store.config.name)) for store in (made.near, made.far))
    remove_ladder(near, near.tenant("pair"))
    return near, far


@pytest.fixture(scope="module")
def texts(made, tmp_path_factory):
    """Returns texts whose labels are drawn from the larger tenant's logits, so that it is right most often."""
    reference, rng = Reference.open(made.model(made.far)), np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    with path.open("w") as file:
        for number in range(TEXTS):
            text, pair = random_text(random.Random(number), 12), random_text(random.Random(-number - 1), 8)
            shares = softmax(reference.forward(text, "pair", pair).numpy().astype(np.float64))[0]
            label = ["no", "yes"][rng.choice(2, p=shares / shares.sum())]
            file.write(json.dumps({"text": text, "text_pair": pair, "label": label}) + "\n")
    return path


def command(stores, texts, *more):
    near, far = stores
    common = ["cascade", "across", "--store", near.folder, "--id", "pair", "--to", far.folder]
    return [*map(str, [*common, "--texts", texts, "--dtype", "fp32"]), *more]


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_command_makes_a_link_that_is_exported(stores, texts, capsys, tmp_path):
    near, _ = stores
    report = run(capsys, *command(stores, texts, "--drop", "100"))
    link = link_of(near, near.tenant("pair"))
    assert link is not None and (link.backbone, link.tenant, link.version) == (FAR, "pair", 1)
    assert link.plan.steps[-1].level == 2 and len(link.plan.steps) > 1
    assert [level["name"] for level in report["levels"]] == [STACK, "own", f"{FAR}/pair"]
    assert report["levels"][2]["score"] > report["levels"][0]["score"]
    assert (report["texts"], report["metric"], report["changed"]) == (TEXTS, "accuracy", True)
    assert mentions(report["plan"]["plan"], f"{FAR}/pair")
    assert not run(capsys, *command(stores, texts, "--drop", "100"))["changed"]
    assert main(command(stores, texts, "--drop", "100")) == 0
    assert mentions(capsys.readouterr().out, "pair", TEXTS, f"{FAR}/pair", "accuracy", "nothing has changed")
    export(near, tmp_path / "repository", OPTIONS)
    assert Backbone(tmp_path / "repository/toy/1").view.snapshot.find("pair").link == link
    assert run(capsys, "cascade", "unlink", "--store", near.folder, "--id", "pair")["changed"]
    assert link_of(near, near.tenant("pair")) is None
    assert not run(capsys, "cascade", "unlink", "--store", near.folder, "--id", "pair")["changed"]


def test_a_target_chooses_a_plan_that_meets_it(stores, texts, capsys):
    strict = run(capsys, *command(stores, texts, "--drop", "5", "--doubt", "0"))
    strong, chosen = strict["levels"][2], strict["plan"]
    assert chosen["score"] >= strong["score"] - 0.05 - 1e-4
    loose = run(capsys, *command(stores, texts, "--drop", "100"))["plan"]
    assert loose["mean_ms"] <= chosen["mean_ms"]
    assert main(command(stores, texts, "--accuracy", "1")) == 1
    assert mentions(capsys.readouterr().err, "'pair'", FAR, "1.0000")


def test_a_profile_tells_what_is_served(made, stores, texts, monkeypatch):
    """The plan's score and shares are those of texts that are taken step by step."""
    near, far = stores
    monkeypatch.setattr("builder.cascade.across.candidates", lambda measured: [tried(measured, (0, 2), 0.6, 2.0, 0.9)])
    sides = [Side(store, store.tenant("pair")) for store in (near, far)]
    target = Target(drop=100.0, doubt=0.0)
    report = link_tenants(*sides, texts, target, [FP32, FP32], CPU, show_progress=False)
    link = link_of(near, near.tenant("pair"))
    assert link is not None and link.prunes
    export(near, near.folder / "repository", OPTIONS)
    here, there = Reference.open(near.folder / "repository/toy/1"), Reference.open(made.model(made.far))
    lookup, right, across, close = Reading(here), 0, 0, 0
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    for line in lines:
        one = Crossing(here, there, "pair", line["text"], line["text_pair"], lookup)
        right += one.answer.labels == [line["label"]]
        across += one.read is not None
        close += one.is_close
    assert report["plan"]["reached"][-1] == pytest.approx(across / TEXTS, abs=close / TEXTS + 1e-4)
    assert report["plan"]["score"] == pytest.approx(right / TEXTS, abs=close / TEXTS + 1e-4)
    assert 0 < across < TEXTS and report["plan"]["pruned"] > 0.05


def test_the_last_level_here_is_timed_with_attention(stores, texts, monkeypatch):
    """It may prune for the larger backbone, whose own level prunes for none."""
    taken = []

    def watched_seconds(engine, texts, tokens, rows, adapters, watch):
        return (1 + watch) * steady_seconds(engine, texts, tokens)

    def candidates(measured):
        taken.extend(measured.times)
        return [tried(measured, (0, 2), 0.6, 2.0, 0.9)]

    monkeypatch.setattr(Engine, "seconds", watched_seconds)
    monkeypatch.setattr("builder.cascade.across.candidates", candidates)
    sides = [Side(store, store.tenant("pair")) for store in stores]
    link_tenants(*sides, texts, Target(drop=100.0, doubt=0.0), [FP32, FP32], CPU, show_progress=False)
    assert [times.watched[0] / times.seconds[0] for times in taken] == pytest.approx([2, 2, 1])


class Reading:
    """Looks texts up as for requests that may follow the link."""

    def __init__(self, reference):
        self._lookup = Lookup(reference.backbone)

    def resolve(self, view, tenant, texts, pairs):
        return self._lookup.resolve(view, tenant, texts, pairs, link=tenant.link)


def test_texts_that_either_training_has_seen_are_left_out(stores, texts, tmp_path, capsys):
    lines = texts.read_text().splitlines(keepends=True)
    seen = tmp_path / "seen.jsonl"
    seen.write_text("".join(lines[:15]))
    report = run(capsys, *command(stores, texts, "--drop", "100", "--seen", str(seen)))
    assert (report["left_out"], report["texts"]) == (15, TEXTS - 15)


@pytest.mark.parametrize("change", ["level", "calibration"])
def test_a_link_for_other_levels_is_not_published(stores, capsys, tmp_path, change):
    near, _ = stores
    tenant = near.tenant("pair")
    link = Link(FAR, "pair", 1, Plan((Step(1, 0.7), Step(2, weight=0.6))))
    save_link(near, tenant, link, {})
    assert link_of(near, tenant) == link
    if change == "level":
        random_level(near, tenant, STACK, 0.3, seed=1)
        assert link_of(near, tenant) is None, "it goes with the ladder"
        return
    save_calibrated(near, tenant, Calibrated(Calibration(temperature=9.0), {}, {}))
    with pytest.raises(Broken, match=mentioning("link.json", "'pair'", "hplm cascade across", "hplm cascade unlink")):
        export(near, tmp_path / "repository", OPTIONS)
    assert main(["verify", "--store", str(near.folder)]) == 1
    assert mentions(capsys.readouterr().err, "link.json")
    assert main(["cascade", "unlink", "--store", str(near.folder), "--id", "pair"]) == 0
    assert main(["verify", "--store", str(near.folder)]) == 0


@pytest.mark.parametrize("broken", ["no JSON", "[]", '{"link": {}, "levels": []}'])
def test_a_broken_link_is_named(stores, broken):
    near, _ = stores
    path = near.tenant_folder("pair", 1) / "link.json"
    path.write_text(broken)
    with pytest.raises(Broken, match=mentioning(path)):
        link_of(near, near.tenant("pair"))


def test_bad_input_is_named(stores, texts, tmp_path, capsys):
    near, far = stores
    few = tmp_path / "few.jsonl"
    few.write_text("".join(texts.read_text().splitlines(keepends=True)[:99]))
    pair = near.tenant("pair")
    random_tenant(far, replace(pair, id="reversed", labels=pair.labels[::-1]), 0.3, seed=1)
    random_tenant(near, replace(pair, id="sure"), 0.3, seed=1)
    assert calibration_of(near, near.tenant("sure")) is None
    random_tenant(far, near.tenant("find"), 0.3, seed=1)
    here, there = ["--store", near.folder], ["--to", far.folder]
    for arguments, named in [
        ([*here, "--id", "nobody", *there, "--texts", texts], ["'nobody'", near.folder]),
        ([*here, "--id", "mark", *there, "--texts", texts], ["'mark'", far.folder]),
        ([*here, "--id", "pair", "--to", near.folder, "--texts", texts], ["'toy'", "hplm cascade build"]),
        ([*here, "--id", "pair", *there, "--to-id", "many", "--texts", texts], ["'pair'", "'many'", "classify", "multilabel"]),
        ([*here, "--id", "pair", *there, "--to-id", "reversed", "--texts", texts], ["'reversed'", "no, yes", "yes, no"]),
        ([*here, "--id", "sure", *there, "--to-id", "pair", "--texts", texts], ["'sure'", "hplm calibrate"]),
        ([*here, "--id", "find", *there, "--texts", texts], ["'find'", "span"]),
        ([*here, "--id", "pair", *there, "--texts", few], [few, 99, 100]),
    ]:
        command = ["cascade", "across", *map(str, arguments), "--drop", "1", "--dtype", "fp32"]
        assert main(command) == 1
        assert mentions(capsys.readouterr().err, *named), (arguments, named)
    assert link_of(near, pair) is None
