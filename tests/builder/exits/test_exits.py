"""`hplm tenant exits`: heads learn from answers of the full stack, and thresholds are chosen that keep an allowed loss."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.evaluation.evaluation import opened
from builder.exits.build import build_exits
from builder.exits.heads import States, learned, outputs_of, states_of
from builder.exits.thresholds import Answered, Estimate, Leaving, chosen
from builder.store.resumable import write_json
from builder.tasks.examples import read_unlabelled
from builder.tasks.tasks import training_task
from builder.training.model import Diverged
from hplm.adapters.layout import exit_layout
from hplm.engine.engine import resolve_precision
from testing.random_store import random_exits, random_tenant
from testing.reference import Reference
from testing.toy import CONFIG, random_text
from tests.builder.stores import cut
from tests.builder.training.small_tenants import write
from tests.cli.commands import printed, run
from tests.support.device import DEVICE
from tests.support.killed import content
from tests.support.learning import by_one_step
from tests.support.message import mentions
from tests.tasks import exported

pytestmark = pytest.mark.slow

FP32 = resolve_precision("fp32", DEVICE)
ASKED = [random_text(random.Random(number), 8) for number in range(300)]
TENANTS = {"multilabel": "many", "tag": "word"}  # `classify` has the tests below
TEXTS = 2000  # of made-up answers
COSTS = np.array([0.0, 0.4, 1.0])


@pytest.fixture
def store(tasks_store):
    return tasks_store


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "texts.jsonl", ({"text": text} for text in ASKED))


def built(store, tenant_id, file, **options):
    return build_exits(store, tenant_id, file, FP32, DEVICE, **options)


@pytest.mark.parametrize("task", TENANTS)
def test_plain_texts_are_enough_and_the_same_call_changes_nothing(store, tmp_path, task, monkeypatch):
    given, seen = states_of, []
    monkeypatch.setattr("builder.exits.build.states_of", lambda *own: seen.append(own[2].dev.examples) or given(*own))
    (file := tmp_path / "texts.txt").write_text("\n".join(2 * ASKED), "utf-8")
    with by_one_step():
        report, is_new = built(store, TENANTS[task], file)
    plans = store.knowledge(store.tenant(TENANTS[task])).exits.exits.plans
    assert is_new and (report["learned_texts"], report["texts"]) == (300, 300)  # no version has learned from a file
    assert not set.intersection(*({example.text for example in own} for own in seen)), "the same text learns and chooses"
    assert all("lost" not in plan for plan in report["plans"])
    assert [plan.cost for plan in plans] == sorted({plan.cost for plan in plans}, reverse=True)
    before = content(store.folder)
    assert built(store, TENANTS[task], file) == (report, False) and content(store.folder) == before
    tenant = store.tenant(TENANTS[task])
    random_tenant(store, replace(tenant, version=tenant.version + 1), 0.3, seed=9)
    assert store.knowledge(store.tenant(tenant.id)).exits is None  # a version that was trained anew has none


def test_texts_with_labels_say_what_is_lost_by_them_and_the_command_prints_plans_and_draws_them(store, tasks, tmp_path, capsys):
    reference = Reference.open(tasks.folder)
    labelled = write(
        tmp_path / "labelled.jsonl", ({"text": text, "label": reference.answer(text, "pair").labels[0]} for text in ASKED)
    )
    report, _ = built(store, "pair", labelled, drops=(0.0, 30.0))
    *_, cheap = report["plans"]
    assert cheap["lost"]["full"] == 100 and cheap["lost"]["points"] == pytest.approx(100 * (1 - cheap["agrees"]), abs=0.02)
    assert cheap["lost"]["off"] > 0 and cheap["expected_loss_off"] > 0
    command = ["tenant", "exits", "pair", "--store", store.folder, "--texts", labelled, "--dtype", "fp32", "--drop", "1", "20"]
    with by_one_step():
        said = printed(capsys, *command)  # another loss is allowed, so the next version has others
    assert mentions(said, "pair version 3 in fp32", 150, labelled, "WORK OF LAYERS", "hplm tenant update")
    told = [run(capsys, *command, *more) for more in ([], ["--picture", tmp_path / "exits.svg"])]
    assert told[0] == told[1] and told[0]["changed"] is False and told[0]["plans"]
    assert "<svg" in (tmp_path / "exits.svg").read_text()


def test_heads_that_an_interruption_has_left_are_not_taught_again(store, file):
    tenant = TENANTS["multilabel"]
    with by_one_step() as anew:
        for options, is_new in (({}, True), ({}, False), ({"seed": 1}, True)):
            cut(store, built, tenant, file, at="save_next", **options)
            assert anew == [is_new] * len(anew) != []
            anew.clear()
        built(store, tenant, file, seed=1)
    heads = store.knowledge(store.tenant(tenant)).exits.heads
    assert anew == [False] * len(heads) and not store.tenant_work_folder(tenant).exists()


def test_without_the_training_file_heads_learn_from_half_of_the_texts(store, file, tmp_path, capsys):
    training = {"file": str(write(tmp_path / "moved.jsonl", [{"text": "changed since"}])), "digest": "of-what-it-was"}
    write_json(store.tenant_folder("pair", 1) / "report.json", {"training": training})
    with by_one_step():
        report, _ = built(store, "pair", file)
    assert (report["learned_texts"], report["texts"]) == (len(ASKED) / 2, len(ASKED) / 2)
    assert mentions(capsys.readouterr().err, "moved.jsonl", file)


def own_states(store, tenant, file, texts):
    task = training_task(tenant.task).unlabelled()
    read = [*read_unlabelled(write(file, ({"text": text} for text in texts)))]
    return states_of(*opened(store, store.knowledge(tenant), read, DEVICE, FP32, task))


@pytest.mark.parametrize("exit", [0, 1, None])
def test_exits_see_what_is_served(store, tmp_path, exit):
    """The engine equals the reference: tests/engine/test_exits.py."""
    tenant, texts = store.tenant("pair"), ASKED[:20]
    found, seen = random_exits(store, tenant, exit, 0.0), own_states(store, tenant, tmp_path / "texts.jsonl", texts)
    own = seen.logits if exit is None else outputs_of(found.heads[exit], found.layout, seen.exits[exit])
    reference = Reference.open(exported(store, tmp_path / "served") / store.config.name / "1")
    served = torch.cat([reference.forward(text, "pair") for text in texts])
    same = int(torch.isclose(served, own, atol=0.02, rtol=0.01).all(dim=1).sum())
    assert same >= len(texts) - (exit is not None)  # one of a hundred that could leave is audited


def made_up(useful=(True, True), look=0.01, seed=0):
    """Two exits. The surer a useful one is, the likelier it is right; one that is not useful is as often wrong when sure."""
    rng = np.random.default_rng(seed)
    sure = rng.uniform(0.5, 1, (2, TEXTS))
    right = rng.uniform(size=(2, TEXTS)) < np.where(np.array(useful)[:, None], sure, 0.5)
    agrees = np.vstack([right, np.ones(TEXTS, bool)])
    return Answered(sure, agrees, 1.0 - agrees, COSTS, look, np.ones(TEXTS))


@pytest.mark.parametrize("useful", [(False, True), (True, False)])
def test_texts_leave_where_it_pays(useful):
    (found,) = chosen(made_up(useful), [1.0])
    assert found.plan.exit == useful.index(True) and found.plan.leaves > 0.02
    (dear,) = chosen(made_up(look=2.0), [1.0])  # looking costs more than all layers
    assert dear.plan.exit is None and dear.plan.cost == 1 and dear.loss.points == 0
    costs = [found.plan.cost for found in chosen(made_up(), (0.0, 1.0, 5.0, 20.0, 100.0))]
    assert costs == sorted(costs, reverse=True) and costs[-1] < 0.05


def test_a_text_leaves_that_is_sure_enough():
    answered = Answered(
        np.array([[0.9, 0.5, 0.5], [0.9, 0.9, 0.5]]), np.array([[0, 1, 1], [1, 1, 1], [1, 1, 1]], bool),
        np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 0]]), COSTS, 0.01, np.ones(3),
    )  # fmt: skip
    assert answered.exits_of(Leaving(0, 0.8)).tolist() == [0, 2, 2]
    assert answered.exits_of(Leaving(None)).tolist() == [2, 2, 2]
    first, second = answered.plan(Leaving(0, 0.8)), answered.plan(Leaving(1, 0.8))
    assert (first.leaves, first.agrees) == (pytest.approx(1 / 3, abs=1e-4), 0.0)
    assert (second.leaves, second.agrees) == (pytest.approx(2 / 3, abs=1e-4), 1.0)
    assert second.cost == pytest.approx((0.4 + 0.4 + 1.0) / 3 + 0.01, abs=1e-4)
    assert chosen(answered, [0.0])[0].plan.exit == 1


def test_halves_judge_each_other():
    """Where confidence says nothing, small samples find lucky thresholds. What is printed is what further texts lose."""
    rng, own, found, further = np.random.default_rng(0), [], [], []

    def answered(texts):
        agrees = np.vstack([rng.uniform(size=(2, texts)) < 0.97, np.ones(texts, bool)])
        return Answered(rng.uniform(0.5, 1, (2, texts)), agrees, 1.0 - agrees, COSTS, 0.01, np.ones(texts))

    for _ in range(24):
        some, others = answered(200), answered(5000)
        (plan,) = chosen(some, [1.0])
        assert plan.agrees == pytest.approx(1 - plan.loss.points / 100, abs=1e-3)
        found.append(plan.loss.points)
        for losses, texts in ((own, some), (further, others)):
            losses.append(100 * texts.losses_of(texts.exits_of(plan.plan)).mean())
    assert np.mean(own) < 0.8, "the standard error of the loss is not counted"
    assert 1.0 < np.mean(further) < np.mean(found) + 0.1


def test_an_interval_is_that_of_1_96_standard_errors():
    assert Estimate.of(np.array([0.0, 1.0, 0.0, 1.0])) == (50.0, round(100 * 1.96 * (1 / 3) ** 0.5 / 2, 2))
    assert Estimate.of(np.array([0.5])) == (50.0, 0.0)


def states(answer, seed=0):
    """Rows that show one number of each text, with noise. `answer` makes logits of these numbers. Also returns the numbers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(600, 1, generator=generator)
    rows = 3 + 2 * numbers + torch.randn(600, 2 * CONFIG.hidden, generator=generator)
    spans = [np.zeros((1, 2), np.int32)] * 600
    return States([rows.half()], answer(numbers), [1] * 600, spans, np.full(600, 9)), numbers


def test_heads_learn_the_answers_of_rows_and_are_rounded_as_they_are_stored():
    layout, task = exit_layout(CONFIG, 2), training_task("classify")
    own, _ = states(lambda numbers: 4 * torch.cat([numbers, -numbers], dim=1))
    others, numbers = states(lambda numbers: numbers, seed=1)
    (head,) = learned(own, layout, task)
    assert {name: weight.shape for name, weight in head.items()} == layout.shapes
    assert all(weight.dtype == torch.float16 for weight in head.values())
    right = outputs_of(head, layout, others.exits[0]).argmax(dim=1) == (numbers[:, 0] < 0).long()
    assert right.float().mean() > 0.85


def test_weights_that_do_not_fit_are_an_error():
    own, _ = states(lambda numbers: torch.cat([numbers, -numbers], dim=1))
    tiny = replace(own, exits=[own.exits[0].float() * 1e-9])  # such numbers are brought to a common scale by large weights
    with pytest.raises(Diverged, match="16 bits"), by_one_step():
        learned(tiny, exit_layout(CONFIG, 2), training_task("classify"))
