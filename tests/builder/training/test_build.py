"""Tenants on a toy backbone learn every task, are scored as they are served, and are trained on. So are their students."""

import html
import json
import random
import shutil
from dataclasses import replace

import pytest
import torch

from builder.evaluation.evaluation import evaluate_tenant
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from builder.students.build import build_students
from builder.students.options import StudentOptions
from builder.students.team import StudentTeam
from testing.random_store import TOY
from testing.reference import Reference
from testing.toy import WORDS
from tests.builder.training.small_tenants import MAKERS, STILL, TASKS, learn, made, weights, write
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import mentions
from tests.tasks import same_labels

pytestmark = pytest.mark.slow

STUDENTS = StudentOptions(depth=2, students=2, rank=4, epochs=2, learning_rate=3e-3)
TAUGHT = {"bio": STUDENTS, "regress": replace(STUDENTS, students=1)}  # tenants that get students


@pytest.fixture(scope="module")
def trained(learnable, tmp_path_factory):
    """A store with a tenant of each entry of TASKS, and the folder of their data: a test changes only copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    store = Store(shutil.copytree(learnable.folder, folder / "store"))
    for name, (task, texts, *_, options) in TASKS.items():
        train, dev, _ = (made(folder, name, *part) for part in ((texts, "train"), (60, "dev"), (150, "test")))
        learn(store, task, train, dev, tenant=name, epochs=6, batch_texts=32, **(options or {"learning_rate": 1e-2}))
    return store, folder


@pytest.fixture
def trained_store(trained, tmp_path):
    """A copy of it, which a test may change."""
    return Store(shutil.copytree(trained[0].folder, tmp_path / "trained"))


@pytest.fixture(scope="module")
def reference(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    export(trained[0], folder, ServingOptions(dtype="fp32"))
    return Reference.open(folder / trained[0].config.name / "1")


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_learned_and_scored_as_it_is_served(trained, reference, name):
    """Answers equal those of the reference. The first test trains five tenants."""
    store, folder = trained
    task, texts, metric, least, _ = TASKS[name]
    evaluation = evaluate_tenant(store, name, folder / f"{name}-test.jsonl", DEVICE)
    assert evaluation.scores.metric == metric and evaluation.scores.main > least
    if task == "embed":
        assert [own[0] for own in evaluation.answers] == nearest_of(reference, name, evaluation.texts.examples)
    else:
        for example, answered in zip(evaluation.texts.examples, evaluation.answers, strict=True):
            assert same_labels(task, answered, reference.answer(example.text, name, example.pair).labels)
    report = store.report(store.tenant(name))  # of how it has learned
    assert report["task"] == task and report["dev"][metric] > least
    assert (report["training"]["texts"], report["dev"]["texts"], report["seed"]) == (texts, 60, 0)
    exams = report["exams"]
    assert len(exams) == report["epochs_run"] and report["best_epoch"] <= report["kept_epoch"]
    assert report["kept_step"] == exams[report["kept_epoch"] - 1]["step"]
    assert report["epochs_run"] == 6 or report["epochs_run"] - report["best_epoch"] == 3  # the patience
    assert name != "cut" or (0.2 < exams[0]["change_held"] < 1 and 0.2 < report["change_held"] <= 1)
    assert (store.tenant_folder(name, 1) / "training.png").read_bytes().startswith(b"\x89PNG")
    check_page((store.tenant_folder(name, 1) / "report.html").read_text(), report)


def nearest_of(reference, name, examples):
    """Returns the positive that is nearest to each text, by the reference's vectors."""
    found = torch.cat([reference.forward(example.pair, name) for example in examples])
    return [
        examples[int((found @ reference.forward(example.text, name, prefix="query")[0]).argmax())].pair for example in examples
    ]


def check_page(page, report):
    """It shows what the report says of labels and mistakes, and loads nothing."""
    assert "<script" not in page and "http" not in page and "data:image/png;base64," in page
    for shown in (*(row["label"] for row in report["by_label"]), *(mistake["text"] for mistake in report["mistakes"])):
        assert html.escape(shown, quote=False) in page
    assert bool(report["by_label"]) == (report["task"] not in ("regress", "span", "embed"))
    if report["task"] in ("classify", "tag"):
        assert sum(row["wanted"] for row in report["by_label"]) == report["dev"]["rows"]
        for row in report["by_label"]:
            own = report["confusion"].get(row["label"], {})
            assert (sum(own.values()), own.get(row["label"], 0)) == (row["wanted"], row["right"])
            assert sum(other.get(row["label"], 0) for other in report["confusion"].values()) == row["answered"]
        confused = any(row["right"] < row["wanted"] for row in report["by_label"])
        assert ("Most often confused" in page) == confused
    else:
        assert "confusion" not in report


def test_training_changes_no_shared_layer(trained, learnable):
    for name in ("upper.safetensors", "lower/root-1.safetensors"):
        assert (trained[0].folder / name).read_bytes() == (learnable.folder / name).read_bytes()


@pytest.mark.parametrize("name", ["regress", "span-or-none", "cut"])
def test_a_version_is_trained_on_from_its_weights(trained_store, tmp_path, name):
    """With a learning rate of almost 0 the next version has the same weights, also where an adapter is cut."""
    store, (task, *_, options) = trained_store, TASKS[name]
    still = {"learning_rate": STILL, **({**options, "body_rate": STILL} if options else {})}
    more, dev = made(tmp_path, name, 40, "more"), made(tmp_path, name, 20, "new dev")
    with by_one_step():
        report = store.report(learn(store, task, more, dev, tenant=name, epochs=1, **still))
    assert report["from_version"] == 1 and report["at_start"]["dev"] == pytest.approx(report["exams"][1]["score"], abs=1e-3)
    if name != "cut":
        before, after = weights(store, name, 1), weights(store, name, 2)
        largest = max(float(part.abs().max()) for part in before.values())
        for place, part in before.items():
            kept = slice(2 if len(part) == 3 else None)  # the threshold of no answer is chosen anew
            assert (part[kept] - after[place][kept]).abs().max() <= 2e-3 * largest  # values are normalised, and rounded
        return
    assert report["change_held"] > 0.999
    (old, _), (new, _) = (store.tenant_weights(store.tenant_version(name, version)) for version in (1, 2))
    for before, after in zip(old, new, strict=True):
        for place in ("query", "ffn_out"):
            products = [layer[f"{place}/b"].float() @ layer[f"{place}/a"].float() for layer in (before, after)]
            assert torch.allclose(*products, atol=2e-3 * float(products[0].abs().max())) and products[0].abs().max() > 0


def with_new_label(rng, name):
    """Returns an example of a tenant's next version: with a word and the label that this word has."""
    if name == "cut":
        return {"text": " ".join([WORDS[10], *rng.choices(WORDS[50:], k=4)]), "label": "up"}
    own, new = MAKERS[name](rng), {"tokens": WORDS[10], "tags": "B-Q", "labels": "has-3"}
    words = {"text": f"{own['text']} {WORDS[10]}"} if name == "multilabel" else {}
    return {**{field: [*part, new[field]] for field, part in own.items() if field != "text"}, **words}


@pytest.mark.parametrize("name", ["bio", "multilabel", "cut"])
def test_a_next_version_learns_new_labels_from_the_weights_before(trained_store, tmp_path, name):
    """No text has a new label before it is learned: at the start, the dev score is that of the version before."""
    store, (task, *_, options) = trained_store, TASKS[name]
    rng, old_dev = random.Random(name), made(tmp_path, name, 60, "new dev")
    train, dev = made(tmp_path, name, 120, "more"), made(tmp_path, name, 40, "dev of both")
    for file, count in ((train, 80), (dev, 40)):
        write(file, [*map(json.loads, file.read_text().splitlines()), *(with_new_label(rng, name) for _ in range(count))])
    known = evaluate_tenant(store, name, old_dev, DEVICE).scores.main
    still = {"learning_rate": STILL, **({**options, "body_rate": STILL} if options else {})}
    with by_one_step():
        made_still = learn(store, task, train, old_dev, tenant=name, epochs=1, new_labels=True, **still)
    assert store.report(made_still)["at_start"]["dev"] == pytest.approx(known, abs=1e-4)
    (_, old), (_, new) = (store.tenant_weights(store.tenant_version(name, version)) for version in (1, 2))
    assert made_still.labels[:-1] == store.tenant_version(name, 1).labels and len(new["bias"]) == len(old["bias"]) + 1
    assert all(torch.equal(new[part][: len(own)], own) for part, own in old.items())
    learned = learn(
        store, task, train, dev, tenant=name, epochs=6, batch_texts=32, new_labels=True, from_version=1,
        **{**options, "learning_rate": 1e-2},
    )  # fmt: skip
    report = store.report(learned)
    (f1,) = [row["f1"] for row in report["by_label"] if row["label"] == learned.labels[-1]]
    assert learned.labels == made_still.labels and f1 > 0.7
    assert report["dev"][report["dev"]["metric"]] > report["at_start"]["dev"]


def test_a_training_that_makes_the_tenant_worse_keeps_the_start(trained_store, tmp_path):
    store = trained_store
    more, dev = made(tmp_path, "multilabel", 40, "more"), made(tmp_path, "multilabel", 60, "new dev")
    with by_one_step():
        ruined = learn(store, "multilabel", more, dev, tenant="multilabel", epochs=1, learning_rate=0.5, doubt=0.0)
    report = store.report(ruined)
    assert (report["best_epoch"], report["kept_epoch"]) == (0, 0)
    assert report["exams"][1]["score"] < report["at_start"]["dev"] and report["kept_step"] == 0
    before, after = (weights(store, "multilabel", version) for version in (1, 2))
    assert all(torch.equal(part, after[name]) for name, part in before.items())
    assert any(mentions(warning, 1) for warning in report["warnings"])


@pytest.fixture(scope="module")
def taught(trained, tmp_path_factory):
    """A copy of that store in which some tenants have students, and what the commands have said of these."""
    store = Store(shutil.copytree(trained[0].folder, tmp_path_factory.mktemp("taught") / "store"))
    return store, {name: build_students(store, name, asked, DEVICE) for name, asked in TAUGHT.items()}


@pytest.mark.parametrize("tenant", TAUGHT)
def test_each_student_learns_what_those_before_it_have_not_and_the_best_number_is_stored(trained, taught, tenant):
    store, (report, is_new) = taught[0], taught[1][tenant]
    missing, scores, kept = [own["residual"] for own in report["boosting"]], report["scores"], report["kept"]
    assert is_new and missing == sorted(missing, reverse=True) and missing[0] < 1
    assert len(missing) == TAUGHT[tenant].students and min(own["alpha"] for own in report["boosting"]) > 0.1, "nothing to learn"
    assert len(scores) == len(missing) and scores[kept - 1] == max(scores) > 0.7 * report["teacher_score"] > 0
    found = store.knowledge(store.tenant(tenant)).students
    assert [team.members for team in found.students.teams] == [*range(kept, 0, -1)] and found.students.depth == 2
    assert len(found.members) == kept
    for members, score in {None: scores[kept - 1], 0: report["teacher_score"], 1: scores[0]}.items():
        judged = evaluate_tenant(store, tenant, trained[1] / f"{tenant}-dev.jsonl", DEVICE, members=members)
        assert judged.scores.main == pytest.approx(score, abs=1e-5)
    assert build_students(store, tenant, TAUGHT[tenant], DEVICE) == (report, False)
    assert store.tenant(tenant).version == report["version"]


def test_the_stored_heads_of_each_number_of_students_add_up_to_what_their_classifier_says():
    team = StudentTeam(TOY, depth=1, rank=2, labels=3, dtype="fp16")
    team.mean, team.spread = 5.0, 2.0  # of values
    for _ in range(3):
        team.add()
    with torch.no_grad():
        for part in team.parts().parameters():
            part.copy_(torch.randn_like(part).half())
        hidden = torch.randn(4, TOY.hidden)
        said = team.read(team.joined(torch.stack([member.read(hidden) for member in team.members])))
    team.add()
    before, last = (member.state_dict() for member in team.members[-2:])
    assert all(torch.equal(part, before[name]) for name, part in last.items()), "a student does not start as the one before it"
    del team.members[-1]
    stored = torch.stack([hidden @ head["weight"].float().T + head["bias"] for _, (_, head) in team.knowledge()]).cumsum(0)
    assert stored.shape == said.shape == (3, 4, 3)
    torch.testing.assert_close(stored, said, rtol=1e-2, atol=0.01 * float(said.std()))
