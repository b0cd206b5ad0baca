"""`hplm cascade profile` and `select`, on tenants of the toy with a level of random weights."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.cascade.levels import OWN, open_levels
from builder.cascade.profile import read_profile
from builder.cascade.profiling import profile_tenant
from builder.store.levels import ladder_of
from builder.store.store import Store
from hplm.cli.main import main
from hplm.engine.engine import resolve_precision
from hplm.levels.calibration import Calibration
from hplm.tasks import softmax
from testing.random_store import random_level, random_stack
from testing.reference import Reference
from testing.toy import random_text
from tests.support.message import mentions
from tests.tasks import make_tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_candidates", "steady_times")]

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)
TEXTS = 130
CALIBRATION = Calibration(temperature=3.0)


def make_level(store, tenant, name, calibration=CALIBRATION, seed=0):
    random_level(store, tenant, name, 0.3, seed, calibration)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_tasks(tmp_path_factory.mktemp("tasks"), {"pair": Calibration(temperature=2.0)})


@pytest.fixture
def store(toy, tmp_path):
    """Returns a store whose tenant `pair` has a level `small`."""
    store = Store(shutil.copytree(toy.store.folder, tmp_path / "store"))
    random_stack(store, "small", 1, seed=1)
    make_level(store, store.tenant("pair"), "small")
    return store


@pytest.fixture(scope="module")
def texts(toy, tmp_path_factory):
    """Returns texts whose labels are drawn from the tenant's own logits, so that its own level is right most often."""
    reference, rng = Reference.open(toy.folder), np.random.default_rng(0)
    path, lines = tmp_path_factory.mktemp("texts") / "texts.jsonl", []
    for text in dict.fromkeys(random_text(random.Random(number), 12) for number in range(2 * TEXTS)):
        shares = softmax(reference.forward(text, "pair").numpy().astype(np.float64))[0]
        lines.append(json.dumps({"text": text, "label": ["no", "yes"][rng.choice(2, p=shares / shares.sum())]}) + "\n")
    path.write_text("".join(lines[:TEXTS]))
    return path


def profiled(store, texts, tenant_id="pair", again=False):
    tenant = store.tenant(tenant_id)
    return profile_tenant(store, tenant, open_levels(store, tenant), texts, FP32, CPU, show_progress=False, again=again)


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_profile_holds_the_front_and_what_its_levels_score(toy, store, texts):
    profile, is_new = profiled(store, texts)
    rows, reference = [json.loads(line) for line in texts.read_text().splitlines()], Reference.open(toy.folder)
    right = np.mean([reference.answer(row["text"], "pair").labels == [row["label"]] for row in rows])
    assert profile.own == pytest.approx(right, abs=0.01)
    assert is_new and profile.names == ["small", OWN]
    small, own = profile.report["levels"]
    assert own["score"] > small["score"] and (small["layers"], own["layers"]) == (1, 2)
    assert (profile.report["texts"], profile.report["left_out"], profile.report["metric"]) == (TEXTS, 0, "accuracy")
    means, trusted = [one.mean for one in profile.front], [one.trusted for one in profile.front]
    assert means == sorted(means, reverse=True) and trusted == sorted(trusted, reverse=True)
    assert trusted[0] >= own["score"]
    assert read_profile(store, store.tenant("pair")) == profile
    shallow, full = profile.times  # each token takes a microsecond for each layer, in every sheet
    assert shallow.batch == full.batch <= 4096 and full.of_token(0) == full.of_token(full.batch) == pytest.approx(2e-6)
    assert small["mean_ms"] == pytest.approx(own["mean_ms"] / 2, rel=0.01)


def test_the_same_command_computes_nothing_and_a_new_calibration_no_level(store, texts, monkeypatch):
    first, _ = profiled(store, texts)
    folder = store.tenant_folder("pair", 1)
    kept = sorted(folder.glob("profile/*"))
    assert len(kept) > 2  # two levels, and the own one on pruned texts

    def refuse(*_, **__):
        raise AssertionError("a level was computed again")

    monkeypatch.setattr("builder.cascade.workload.computed", refuse)
    assert profiled(store, texts) == (first, False)
    assert profiled(store, texts, again=True) == (first, True)
    make_level(store, store.tenant("pair"), "small", calibration=replace(CALIBRATION, temperature=1.5))
    again, is_new = profiled(store, texts)
    assert is_new and again.report["levels"][0]["score"] == first.report["levels"][0]["score"]
    assert sorted(folder.glob("profile/*")) == kept


def test_the_commands_choose_a_ladder(store, texts, capsys):
    common = ["--store", store.folder, "--id", "pair"]
    command = ["cascade", "profile", *common, "--texts", texts, "--dtype", "fp32"]
    first = run(capsys, *command)
    picture = store.folder / "profile.png"
    assert first["changed"] and not run(capsys, *command, "--picture", picture)["changed"]
    assert picture.stat().st_size > 1000
    (chosen,) = run(capsys, "cascade", "select", *common, "--drop", "100")["tenants"]
    ladder = ladder_of(store, store.tenant("pair"))
    assert len(chosen["ladder"]) == len(ladder) == 1  # the fastest of all
    report = run(capsys, "cascade", "select", "--store", store.folder, "--all", "--drop", "0")
    (chosen,) = report["tenants"]
    stacks = {tuple(one["stacks"]): one["chosen"] for one in report["stacks"]}
    assert () in stacks and sum(stacks.values()) == 1
    ladder = ladder_of(store, store.tenant("pair"))
    assert chosen["ladder"][0]["score"] >= chosen["own"]["score"] - 1e-4
    assert len(ladder) == len(chosen["ladder"]) and ladder[0].suits(2)
    times = [one["mean_ms"] for one in chosen["ladder"]]
    assert times == sorted(times, reverse=True)
    assert main(["cascade", "select", "--store", str(store.folder), "--all", "--drop", "0"]) == 0
    assert mentions(capsys.readouterr().out, "none", "chosen", "hplm export")


def test_a_tenant_without_a_fitting_profile_keeps_its_ladder(store, texts, capsys):
    profiled(store, texts)
    make_level(store, store.tenant("many"), "small")
    assert main(["cascade", "select", "--store", str(store.folder), "--all", "--drop", "0"]) == 1
    assert mentions(capsys.readouterr().err, "many", "keep", "former", "table")
    make_level(store, store.tenant("pair"), "small", seed=5)
    assert main(["cascade", "select", "--store", str(store.folder), "--id", "pair", "--drop", "1"]) == 1
    assert mentions(capsys.readouterr().err, "'pair'", "profile") and ladder_of(store, store.tenant("pair")) is None


def test_bad_input_is_named(store, texts, tmp_path, capsys):
    (few := tmp_path / "few.jsonl").write_text("".join(texts.read_text().splitlines(keepends=True)[:99]))
    for arguments, named in [
        (["profile", "--id", "mark", "--texts", texts], ["'mark'", "hplm cascade build"]),
        (["profile", "--id", "pair", "--texts", few], [few, 99, 100, "'pair'"]),
        (["select", "--id", "pair", "--drop", "1"], ["'pair'", "hplm cascade profile"]),
        (["select", "--id", "pair", "--accuracy", "93"], ["--accuracy 93"]),
    ]:
        assert main(["cascade", *map(str, arguments), "--store", str(store.folder)]) == 1
        assert mentions(capsys.readouterr().err, *named), (arguments, named)
    assert not (store.tenant_folder("pair", 1) / "profile").exists(), "too few texts are refused before a level is computed"
