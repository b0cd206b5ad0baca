"""`hplm cascade report`, on tenants of the toy with a level of random weights."""

from __future__ import annotations

import json
import random
import re
import shutil

import pytest
import torch

from builder.cascade.levels import open_levels
from builder.cascade.profiling import profile_tenant
from builder.cascade.report.figures import Examined
from builder.cascade.report.subject import Subject
from builder.cascade.report.ways import CASCADE, INFAAS, ORACLE, STRONG
from builder.store.calibrations import Calibrated
from builder.store.levels import calibrate_level, save_ladder, stored_level
from builder.store.resumable import digest_of
from builder.store.store import Store
from hplm.cli.main import main
from hplm.engine.engine import Engine, resolve_precision
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from testing.random_store import random_level, random_stack
from testing.toy import random_text
from tests.builder.cascade.measured import steady_seconds
from tests.support.killed import content
from tests.support.message import mentions
from tests.tasks import make_tasks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)
TEXTS = 130
NUMBERS = Calibration(kind="bins", delta=0.5, edges=(0.0,), shares=(0.4, 0.7))
CALIBRATIONS = {"pair": Calibration(temperature=3.0), "mark": NUMBERS, "word": Calibration(temperature=2.0)}
LADDER = (Plan((Step(0, 0.75, 16.0, 0.5), Step(1, weight=0.7))), Plan((Step(0),)))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store whose tenants have a level, a profile and a ladder; and files, by tenant and use."""
    folder = tmp_path_factory.mktemp("report")
    store = make_tasks(folder / "tasks", {"mark": NUMBERS}).store
    random_stack(store, "small", 1, seed=1)
    for tenant_id, calibration in CALIBRATIONS.items():
        tenant = store.tenant(tenant_id)
        random_level(store, tenant, "small", 0.3, 0)
        texts = write(folder, tenant, "calibrate", TEXTS)
        known = Calibrated(calibration, {"texts": digest_of(texts)}, {"file": str(texts)})
        calibrate_level(store, stored_level(store, tenant, "small"), known)
        for use in ("profile", "test"):
            write(folder, tenant, use, TEXTS)
        with pytest.MonkeyPatch.context() as few:
            for name, values in (("CUTOFFS", (0.9, 0.7)), ("SLOPE", 16.0), ("ALPHAS", (0.5,))):
                few.setattr(f"builder.cascade.candidates.{name}", values)
            few.setattr(Engine, "seconds", steady_seconds)
            levels = open_levels(store, tenant)
            profile_tenant(store, tenant, levels, folder / f"{tenant_id}.profile.jsonl", FP32, CPU, show_progress=False)
        save_ladder(store, tenant, LADDER)
    return folder, store


@pytest.fixture
def place(built, tmp_path):
    shutil.copytree(built[1].folder, tmp_path / "store")
    return built[0], Store(tmp_path / "store")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("builder.cascade.report.figures.CUTOFFS", (0.5, 0.9))
    monkeypatch.setattr("builder.cascade.report.figures.ALPHAS", (1.0,))
    monkeypatch.setattr("builder.cascade.report.answers.DRAWS", 3)
    monkeypatch.setattr("builder.cascade.report.outcomes.GROUPS", 4)


def write(folder, tenant, use, count):
    rng = random.Random(f"{tenant.id} {use}")
    texts = dict.fromkeys(f"{random_text(rng, 12)} {use} {random_text(rng, 3)}" for _ in range(2 * count))
    path = folder / f"{tenant.id}.{use}.jsonl"
    path.write_text("".join(json.dumps(line_of(tenant, text, rng)) + "\n" for text in list(texts)[:count]))
    return path


def line_of(tenant, text, rng):
    if tenant.task == "tag":
        tokens = text.split()
        return {"tokens": tokens, "tags": [rng.choice(tenant.labels) for _ in tokens]}
    return {"text": text, "label": rng.choice(tenant.labels) if tenant.task == "classify" else rng.random()}


def test_the_command_writes_page_figures_and_pictures_and_the_store_stays(place, capsys):
    """Takes seconds, because it draws a picture for each part of three tenants."""
    before = content(place[1].folder)
    folder, store = place
    texts, to = [f"{tenant}={folder / f'{tenant}.test.jsonl'}" for tenant in CALIBRATIONS], store.folder.parent / "report"
    assert main(["cascade", "report", "--store", str(store.folder), "--texts", *texts, "--to", str(to), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert content(place[1].folder) == before
    page, report = (to / "report.md").read_text(), json.loads((to / "report.json").read_text())
    assert set(told["tenants"]) == {"pair", "mark", "word"} and told["across"] == report["across"]
    shown = re.findall(r"!\[.*\]\((.*)\)", page)
    assert sorted(shown) == sorted(path.name for path in to.glob("*.svg")) and "pair-pruning.svg" in shown
    assert all((to / name).stat().st_size > 1000 for name in shown)
    assert mentions(page, "## pair", "## mark", "## word", "all tenants", TEXTS, "none (")
    pair, mark, word = report["tenants"]
    assert (pair["texts"], pair["left_out"], pair["rung"]) == (TEXTS, 0, 1)
    assert [one["metric"] for one in report["tenants"]] == ["accuracy", "pearson", "entity_f1"]
    for own in report["tenants"]:
        strong, ways = own["ways"][STRONG], own["ways"]
        assert (strong["points"], strong["points_error"], strong["mean_over_strong"]) == (0, 0, 1)
        assert ways["level small"]["mean_ms"] < strong["mean_ms"] and ways[CASCADE]["points_error"] > 0
        assert ways[CASCADE]["score"] - strong["score"] == pytest.approx(ways[CASCADE]["points"] / 100, abs=1e-3)
        infaas = own["against"][INFAAS]
        assert infaas["points"] == pytest.approx(100 * (ways[CASCADE]["score"] - ways[INFAAS]["score"]), abs=0.02)
        assert infaas["mean_over_other"] == pytest.approx(ways[CASCADE]["mean_ms"] / ways[INFAAS]["mean_ms"], rel=0.02)
    assert pair["ways"][ORACLE]["score"] >= max(pair["ways"][way]["score"] for way in (STRONG, "level small"))
    assert "before" not in mark["confidence"] and "alphas" not in word
    assert sum(one["texts"] for one in pair["confidence"]["parts"]) == TEXTS
    (chosen,) = [row for row in pair["cutoffs"] if row["chosen"]]
    assert (chosen["cutoff"], chosen["score"]) == (0.75, pair["ways"][CASCADE]["score"])
    assert [row["cutoff"] for row in pair["cutoffs"]] == [0.5, 0.75, 0.9]
    whole, own, more = pair["alphas"]
    assert (whole["pruned"], whole["points"], whole["mean_over_whole"]) == (0, 0, 1) and own["chosen"]
    assert more["pruned"] > own["pruned"] >= 0


def test_texts_that_calibrated_or_profiled_are_left_out_and_costs_are_those_of_the_profile(place):
    folder, store = place
    mixed, path = store.folder.parent / "mixed.jsonl", store.tenant_folder("pair", 1) / "profile.json"
    mixed.write_text("".join((folder / f"pair.{use}.jsonl").read_text() for use in ("test", "profile", "calibrate")))
    stored = json.loads(path.read_text())
    small, own = stored["report"]["levels"]
    small["sheets"] = {"tokens": [500, 1000], "ms": [500, 1000], "watched_ms": [2000, 4000]}  # the plan prunes
    own["sheets"] = {"tokens": [500, 1000], "ms": [1000, 2000], "watched_ms": [1000, 2000]}
    path.write_text(json.dumps(stored))
    subject = Subject.open(store, "pair", mixed, [])
    assert (len(subject.unseen.fresh.examples), subject.unseen.left_out) == (TEXTS, 2 * TEXTS)
    answers = subject.answers(store.folder.parent, CPU, False)
    ways, (first, last) = Examined(subject, answers, 0.5).ways, answers.through(subject.plan).tokens
    assert ways[STRONG].seconds == pytest.approx(0.002 * answers.measured.whole[-1].tokens)
    assert ways[CASCADE].seconds == pytest.approx(0.004 * first + 0.002 * last)


@pytest.mark.parametrize(
    "texts, named",
    [
        ("nobody=x", ["'nobody'"]),
        ("many={0}/pair.test.jsonl", ["'many'", "no levels", "hplm cascade build"]),
        ("pair={0}/pair.profile.jsonl", ["pair.profile.jsonl", "'pair'", "chosen"]),
        ("pair={0}/pair.calibrate.jsonl", ["pair.calibrate.jsonl", "'pair'", "calibrated"]),
    ],
)
def test_bad_input_is_named(built, tmp_path, capsys, texts, named):
    texts, to = texts.format(built[0]), tmp_path / "report"
    assert main(["cascade", "report", "--store", str(built[1].folder), "--texts", texts, "--to", str(to)]) == 1
    assert mentions(capsys.readouterr().err, *named) and not to.exists()
