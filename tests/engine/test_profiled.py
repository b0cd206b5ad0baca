"""A profile and the engine take the same texts the same way: as many of them go on, and they cost as much."""

from __future__ import annotations

import json
import random

import pytest
import torch

from builder.cascade.candidates import tried
from builder.cascade.kept import Kept
from builder.cascade.levels import open_levels
from builder.cascade.workload import Workload
from builder.store.levels import save_ladder
from builder.training.examples import Reader
from builder.training.tasks import training_task
from hplm.engine.engine import Engine, resolve_precision
from hplm.tenants.level import FULL
from tests.engine.asker import Asker
from tests.ladders import add_levels
from tests.tasks import TENANTS, exported, make_tasks, question

CPU = torch.device("cpu")
TEXTS = 120
PLANS = ((0.0, 4.0, 0.0), (0.0, 4.0, 0.9), (0.2, 4.0, 1.1))  # cutoff, slope and alpha


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = make_tasks(tmp_path_factory.mktemp("profiled")).store
    add_levels(store)
    return store


@pytest.fixture
def sheets(monkeypatch):
    """Returns a list that fills with the tokens of each computed sheet, times the share of its stack's layers."""
    found, compute = [], Engine._compute

    def watched(engine, sheet, stage):
        found.append(int(sheet.lengths.sum()) * engine.depths[sheet.stack] / engine.depths[FULL])
        return compute(engine, sheet, stage)

    monkeypatch.setattr(Engine, "_compute", watched)
    return found


def profiled(store, tenant, asked, folder):
    """Returns the candidates that a profile makes of these texts."""
    path = folder / "texts.jsonl"
    held = {"label": tenant.labels[0]} if tenant.task == "classify" else {"labels": tenant.labels[:1]}
    pairs = ({"text": text, **({"text_pair": pair} if pair else {}), **held} for text, pair in asked)
    path.write_text("".join(json.dumps(own) + "\n" for own in pairs), "utf-8")
    task, reader = training_task(tenant.task), Reader(store, tenant.domain, tenant.domain_version)
    labelled = task.read(path)
    texts = reader.read(labelled, task, tenant.labels, False)
    levels, precision = open_levels(store, tenant), resolve_precision("fp32", CPU)
    measured = Workload(tenant, task, levels, labelled, reader, texts, precision, CPU, Kept(folder, {})).measured()
    return [tried(measured, (0, 1), *numbers) for numbers in PLANS]


@pytest.mark.parametrize("tenant", [one for one in TENANTS if one.task in ("classify", "multilabel")], ids=lambda one: one.id)
def test_as_many_texts_go_on_as_were_profiled_and_they_cost_as_much(store, tenant, sheets, tmp_path):
    rng = random.Random(11)
    asked = [question(rng, tenant.task) for _ in range(TEXTS)]
    found = profiled(store, tenant, asked, tmp_path)
    save_ladder(store, tenant, [one.plan for one in found])
    asker = Asker(exported(store, tmp_path / "repository") / "toy" / "1")
    view = asker.backbone.view
    served = view.snapshot.find(tenant.id)
    for rung, one in enumerate(found, start=1):
        del sheets[:]
        numbers = [asker.ask(tenant.id, [text], pair and [pair], rung=rung) for text, pair in asked]
        levels = [asker.wait(number)[0].level for number in numbers]
        assert 0.1 < one.reached[1] < 0.9 and levels.count(2) / TEXTS == one.reached[1]
        tokens = sum(len(asker.lookup.resolve(view, served, [text], pair and [pair]).addresses) for text, pair in asked)
        assert sum(sheets) / tokens == pytest.approx(one.plan.cost)
    asker.close()
    assert found[1].pruned and found[1].plan.cost < found[0].plan.cost
