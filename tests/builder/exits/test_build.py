"""`hplm tenant exits`: exits of tenants that learn from answers of their own full stack."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from builder.evaluation.tenant import opened
from builder.exits.build import build_exits
from builder.exits.heads import outputs_of
from builder.exits.states import states_of
from builder.tasks.examples import Bare, read_labelled
from builder.tasks.tasks import training_task
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from testing.random_store import random_exits, random_tenant
from testing.reference import Reference
from testing.toy import random_text
from tests.builder.stores import interrupted
from tests.builder.training.small_tenants import made, write
from tests.cli.commands import printed, refused, run
from tests.support.device import DEVICE
from tests.support.killed import content
from tests.support.learning import by_one_step, step_once
from tests.support.message import mentioning, mentions
from tests.tasks import exported

pytestmark = pytest.mark.slow

FP32 = resolve_precision("fp32", DEVICE)
TEXTS = [random_text(random.Random(number), 8) for number in range(300)]
TENANTS = {"multilabel": "many", "tag": "word", "regress": "mark"}  # `classify` has the tests below


@pytest.fixture
def store(tasks_store):
    return tasks_store


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))


def built(store, tenant_id, file, **options):
    return build_exits(store, tenant_id, file, FP32, DEVICE, **options)


@pytest.mark.parametrize("task", TENANTS)
def test_texts_without_labels_are_enough_and_the_same_call_changes_nothing(store, file, task):
    with by_one_step():
        report, is_new = built(store, TENANTS[task], file)
    plans = store.knowledge(store.tenant(TENANTS[task])).exits.exits.plans
    assert is_new and (report["learned_texts"], report["texts"]) == (150, 150)  # no version has learned from a file
    assert all("lost" not in plan for plan in report["plans"])
    assert (report["delta"] is not None) == (task == "regress")
    assert [plan.cost for plan in plans] == sorted({plan.cost for plan in plans}, reverse=True)
    before = content(store.folder)
    assert built(store, TENANTS[task], file) == (report, False) and content(store.folder) == before
    tenant = store.tenant(TENANTS[task])
    random_tenant(store, replace(tenant, version=tenant.version + 1), 0.3, seed=9)
    assert store.knowledge(store.tenant(tenant.id)).exits is None  # a version that was trained anew has none


def test_texts_with_labels_say_what_is_lost_by_them_and_the_command_prints_plans_and_draws_them(store, tasks, tmp_path, capsys):
    reference = Reference.open(tasks.folder)
    labelled = write(
        tmp_path / "labelled.jsonl", ({"text": text, "label": reference.answer(text, "pair").labels[0]} for text in TEXTS)
    )
    report, _ = built(store, "pair", labelled, drops=(0.0, 30.0))
    *_, cheap = report["plans"]
    assert cheap["lost"]["full"] == 100 and cheap["lost"]["points"] == pytest.approx(100 * (1 - cheap["agrees"]), abs=8)
    assert cheap["lost"]["off"] > 0 and cheap["expected_loss_off"] > 0
    command = ["tenant", "exits", "pair", "--store", store.folder, "--texts", labelled, "--dtype", "fp32", "--drop", "1", "20"]
    with by_one_step():
        said = printed(capsys, *command)  # another loss is allowed, so the next version has others
    assert mentions(said, "pair version 3 in fp32", 150, labelled, "work of layers", "hplm tenant update")
    told = [run(capsys, *command, *more) for more in ([], ["--picture", tmp_path / "exits.svg"])]
    assert told[0] == told[1] and told[0]["changed"] is False and told[0]["plans"]
    assert "<svg" in (tmp_path / "exits.svg").read_text()
    for option, wrong in (("--picture", "exits.txt"), ("--texts", "absent"), ("--seen", "gone")):
        assert mentions(refused(capsys, *command, option, wrong), wrong)


def test_heads_that_an_interruption_has_left_are_not_taught_again(store, file, monkeypatch):
    taught = []

    def train(training, limits, saved):
        taught.append(saved.load() is None)
        return step_once(training, limits, saved)

    monkeypatch.setattr("builder.exits.heads.train", train)
    for options, is_new in (({}, True), ({}, False), ({"seed": 1}, True)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("builder.exits.build.calibrations_for", interrupted)
            built(store, TENANTS["multilabel"], file, **options)
        assert taught == [is_new] * len(taught) != []
        taught.clear()
    built(store, TENANTS["multilabel"], file, seed=1)
    heads = store.knowledge(store.tenant(TENANTS["multilabel"])).exits.heads
    assert taught == [False] * len(heads) and not store.tenant_work_folder(TENANTS["multilabel"]).exists()


def states(store, tenant, file, texts):
    task = training_task(tenant.task).unlabelled()
    labelled = read_labelled(write(file, ({"text": text} for text in texts)), Bare)
    return states_of(*opened(store, tenant, store.tenant_weights(tenant), labelled, DEVICE, FP32, task))


@pytest.mark.parametrize("exit", [0, 1, None])
def test_exits_see_what_is_served(store, tmp_path, exit):
    """The engine equals the reference: tests/engine/test_exits.py."""
    tenant, texts = store.tenant("pair"), TEXTS[:20]
    found, seen = random_exits(store, tenant, exit, 0.0), states(store, tenant, tmp_path / "texts.jsonl", texts)
    own = seen.logits if exit is None else outputs_of(found.heads[exit], found.layout, seen.exits[exit])
    reference = Reference.open(exported(store, tmp_path / "served") / store.config.name / "1")
    served = torch.cat([reference.forward(text, "pair") for text in texts])
    same = int(torch.isclose(served, own, atol=0.02, rtol=0.01).all(dim=1).sum())
    assert same >= len(texts) - (exit is not None)  # one of a hundred that could leave is audited


@pytest.mark.parametrize(
    "tenant, options, named",
    [
        ("find", {}, ["'find'", "windows"]),
        ("pair", {"drops": ()}, ["drops"]),
        ("pair", {"drops": (2.0, 1.0)}, ["2.0, 1.0"]),
        ("pair", {"drops": (-1.0,)}, ["-1.0"]),
        ("mark", {"delta": float("nan")}, ["delta nan"]),
    ],
)
def test_tenants_that_cannot_have_exits_are_refused_with_the_reason(tasks, file, tenant, options, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        built(tasks.store, tenant, file, **options)


def test_exits_can_be_made_right_after_the_training(store, file, tmp_path, capsys):
    train = made(tmp_path, "classify", 150, seed=1)
    command = ["build", "tenant", "--id", "acme", "--task", "classify", "--train", train, "--store", store.folder]
    command += ["--epochs", "1", "--rank", "4", "--device", "cpu", "--exits"]
    for task, texts, named in (("classify", tmp_path / "absent", tmp_path / "absent"), ("span", file, "no exits")):
        assert mentions(refused(capsys, *command, texts, "--task", task), named) and store.tenant("acme") is None
    with by_one_step():
        assert run(capsys, *command, file)["exits"]["texts"] == len(TEXTS)
    assert store.report(store.tenant("acme"))["exits"]["report"]["learned_texts"] == 150
