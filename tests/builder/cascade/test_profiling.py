"""`hplm cascade profile` and `select`, on tenants of the toy with a level of random weights."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch

from builder.cascade.answering import Computed, computed
from builder.cascade.kept import Kept
from builder.cascade.levels import OWN, open_levels
from builder.cascade.profile import read_profile
from builder.cascade.profiling import profile_tenant
from builder.store.levels import ladder_of
from builder.store.store import Store, TenantFile
from builder.training.examples import Reader
from builder.training.model import TenantModel
from builder.training.tasks import training_task
from hplm.cli.main import main
from hplm.engine.engine import resolve_precision
from hplm.errors import Broken, InvalidInput
from hplm.levels.calibration import Calibration
from hplm.levels.plan import Plan, Step
from hplm.model.attention import PackedAttention
from hplm.tasks import softmax
from testing.random_store import random_level, random_stack
from testing.reference import Reference
from testing.toy import random_text
from tests.support.message import mentioning, mentions
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
    path = tmp_path_factory.mktemp("texts") / "held.jsonl"
    with path.open("w") as file:
        for text in dict.fromkeys(random_text(random.Random(number), 12) for number in range(2 * TEXTS)):
            shares = softmax(reference.forward(text, "pair").numpy().astype(np.float64))[0]
            file.write(json.dumps({"text": text, "label": ["no", "yes"][rng.choice(2, p=shares / shares.sum())]}) + "\n")
    return cut(path, path.with_name("texts.jsonl"), TEXTS)


def cut(path, target, lines):
    target.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    return target


def profiled(store, texts, tenant_id="pair", again=False):
    tenant = store.tenant(tenant_id)
    return profile_tenant(store, tenant, open_levels(store, tenant), texts, FP32, CPU, show_progress=False, again=again)


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_own_level_answers_as_the_reference_does(toy, store, texts):
    tenant, reference = store.tenant("pair"), Reference.open(toy.folder)
    labelled, reader = training_task("classify").read(texts), Reader(store, tenant.domain, tenant.domain_version)
    read = reader.read(labelled, training_task("classify"), tenant.labels, False)
    found = computed(open_levels(store, tenant)[-1], reader, read, FP32, CPU)
    for example, logits in zip(labelled.examples[:20], found.logits, strict=False):
        assert logits == pytest.approx(reference.forward(example.text, "pair").numpy(), abs=1e-3)


def test_words_that_are_left_out_change_neither_the_vectors_nor_the_positions_of_the_others(store, texts):
    tenant = store.tenant("pair")
    level, _ = open_levels(store, tenant)
    task, reader = training_task("classify"), Reader(store, tenant.domain, tenant.domain_version)
    read = reader.read(task.read(texts), task, tenant.labels, False)
    stay = [np.arange(len(text.tokens)) % 3 != 1 for text in read.texts]
    found = computed(level, reader, read, FP32, CPU, watch=True, stay=stay)
    upper, model = level.open().eval(), TenantModel(level.adapter, level.head, seed=0)
    model.load(*level.weights)
    for number in (0, 7, 50):
        pack, kept = reader.pack(read, np.array([number]), CPU), torch.from_numpy(stay[number])
        x = upper.enter(pack.sums[kept], pack.positions[kept], pack.segments[kept])
        attend = PackedAttention([len(x)], store.config.heads)
        body = partial(body_of, upper, x, attend)
        with torch.no_grad():
            expected = model(body, replace(pack, tokens=pack.tokens[: len(x)]))
        assert found.logits[number] == pytest.approx(expected.numpy(), abs=1e-4)
        # One layer: each token gives 1 in each head.
        assert found.received[number].sum() == pytest.approx(store.config.heads * len(x), rel=1e-5)


def body_of(upper, x, attend, pack, adapters):
    return upper.through(x, attend, adapters, torch.tensor([0]))


def test_a_profile_holds_the_front_and_what_its_levels_score(store, texts):
    profile, is_new = profiled(store, texts)
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


def test_a_profile_of_an_earlier_version_is_made_again(store, texts, capsys):
    first, _ = profiled(store, texts)
    path = store.tenant_folder("pair", 1) / "profile.json"
    stored = json.loads(path.read_text())
    stored["asked"]["format"] = 2
    path.write_text(json.dumps(stored))
    assert main(["cascade", "select", "--store", str(store.folder), "--id", "pair", "--drop", "1"]) == 1
    assert mentions(capsys.readouterr().err, "'pair'", "hplm cascade profile")
    again, is_new = profiled(store, texts)
    assert is_new and again.asked == first.asked


def test_answers_of_older_levels_and_broken_ones_are_not_taken(store, texts):
    first, _ = profiled(store, texts)
    folder = store.tenant_folder("pair", 1) / "profile"
    before = {path.name for path in folder.iterdir()}
    make_level(store, store.tenant("pair"), "small", seed=1)
    other, _ = profiled(store, texts)
    assert other.report["levels"][0]["score"] != first.report["levels"][0]["score"]
    assert other.report["levels"][1]["score"] == first.report["levels"][1]["score"]
    after = {path.name for path in folder.iterdir()}
    assert before & after and before - after and after - before
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    (store.tenant_folder("pair", 1) / "profile.json").unlink()
    assert [one["score"] for one in profiled(store, texts)[0].report["levels"]] == [
        one["score"] for one in other.report["levels"]
    ]


def test_the_commands_choose_a_ladder(store, texts, capsys):
    common = ["--store", store.folder, "--id", "pair"]
    command = ["cascade", "profile", *common, "--texts", texts, "--dtype", "fp32"]
    first = run(capsys, *command)
    picture = store.folder / "profile.png"
    assert first["changed"] and not run(capsys, *command, "--picture", picture)["changed"]
    assert picture.stat().st_size > 1000
    assert main([str(word) for word in command]) == 0
    assert mentions(capsys.readouterr().out, "small", OWN, "accuracy", TEXTS)
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
    assert main(["cascade", "select", *map(str, common), "--drop", "0"]) == 0
    assert mentions(capsys.readouterr().out, "accuracy", "hplm export")
    assert main(["cascade", "select", "--store", str(store.folder), "--all", "--drop", "0"]) == 0
    assert mentions(capsys.readouterr().out, "none", "chosen", "hplm export")


def test_tenants_that_fail_keep_their_ladders(store, texts, capsys):
    profiled(store, texts)
    make_level(store, store.tenant("many"), "small")
    assert main(["cascade", "select", "--store", str(store.folder), "--all", "--drop", "0"]) == 1
    assert mentions(capsys.readouterr().err, "many", "keep", "former", "table")


def test_a_profile_of_other_levels_is_refused(store, texts, capsys):
    profiled(store, texts)
    make_level(store, store.tenant("pair"), "small", seed=5)
    assert main(["cascade", "select", "--store", str(store.folder), "--id", "pair", "--drop", "1"]) == 1
    assert mentions(capsys.readouterr().err, "'pair'", "profile")
    assert ladder_of(store, store.tenant("pair")) is None


def test_a_task_with_windows_or_words_is_never_pruned(store, tmp_path):
    rng = random.Random(3)
    questions, words = tmp_path / "questions.jsonl", tmp_path / "words.jsonl"
    with questions.open("w") as file:
        for number in range(100):
            text, passage = random_text(rng, 8), random_text(rng, 200 if number % 2 else 20)  # the model takes 64 tokens
            answers = {"text": [passage.split()[0]], "answer_start": [0]}
            file.write(json.dumps({"text": text, "text_pair": passage, "answers": answers}) + "\n")
    with words.open("w") as file:
        for _ in range(100):
            tokens = random_text(rng, 10).split()
            file.write(json.dumps({"tokens": tokens, "tags": [rng.choice(["O", "B-X"]) for _ in tokens]}) + "\n")
    for tenant_id, file in (("find", questions), ("word", words)):
        make_level(store, store.tenant(tenant_id), "small")
        profile, _ = profiled(store, file, tenant_id)
        assert all(step.alpha == 0 for one in profile.front for step in one.plan.steps)
        assert len(list(store.tenant_folder(tenant_id, 1).glob("profile/*"))) == 2
    assert profile.report["metric"] == "entity_f1"


@pytest.mark.parametrize(
    ("tenant_id", "calibration", "metric"),
    [("many", CALIBRATION, "micro_f1"), ("mark", Calibration("bins", edges=(0.0,), shares=(0.6, 0.9)), "pearson")],
)
def test_labels_and_numbers_are_profiled_and_pruned(toy, store, tmp_path, tenant_id, calibration, metric):
    tenant, reference, path = store.tenant(tenant_id), Reference.open(toy.folder), tmp_path / "texts.jsonl"
    with path.open("w") as file:
        for number in range(100):
            text = random_text(random.Random(number), 12)
            logits = reference.forward(text, tenant_id).numpy()[0]
            held = [label for label, logit in zip(tenant.labels, logits, strict=True) if logit > 0]
            answer = {"labels": held} if tenant_id == "many" else {"label": float(logits[0])}
            file.write(json.dumps({"text": text, **answer}) + "\n")
    make_level(store, tenant, "small", calibration=calibration)
    profile, _ = profiled(store, path, tenant_id)
    assert profile.report["metric"] == metric
    assert profile.own == pytest.approx(1.0, abs=0.01) and profile.report["levels"][0]["score"] < 0.9
    assert profile.front[0].score == pytest.approx(1.0, abs=0.01)
    assert len(list(store.tenant_folder(tenant_id, 1).glob("profile/*"))) > 2


def test_a_tenant_that_generates_has_no_levels(store):
    with pytest.raises(InvalidInput, match="'chat'"):
        open_levels(store, TenantFile("chat", 1, "root", 1, "generate", [], 0))


def test_the_checks_of_all_files_know_the_ladder(store, texts, capsys):
    assert main(["verify", "--store", str(store.folder)]) == 0
    (store.tenant_folder("pair", 1) / "ladder.json").write_text('{"plans": []}')
    capsys.readouterr()
    assert main(["verify", "--store", str(store.folder)]) == 1
    assert mentions(capsys.readouterr().err, store.tenant_folder("pair", 1) / "ladder.json")


def test_bad_input_is_named(store, texts, tmp_path, capsys):
    few = cut(texts, tmp_path / "few.jsonl", 99)
    make_level(store, store.tenant("many"), "small")
    common = ["--store", str(store.folder)]
    for arguments, named in [
        (["profile", *common, "--id", "nobody", "--texts", texts], ["'nobody'"]),
        (["profile", *common, "--id", "mark", "--texts", texts], ["'mark'", "hplm cascade build"]),
        (["profile", *common, "--id", "pair", "--texts", few], [few, 99, 100, "'pair'"]),
        (["profile", *common, "--id", "pair", "--texts", texts, "--picture", "x.bmp"], ["x.bmp"]),
        (["select", *common, "--id", "pair", "--drop", "1"], ["'pair'", "hplm cascade profile"]),
        (["select", *common, "--id", "pair", "--drop", "-1"], ["--drop -1"]),
        (["select", *common, "--id", "pair", "--accuracy", "93"], ["--accuracy 93"]),
        (["select", *common, "--all", "--drop", "1"], ["many", "pair"]),
    ]:
        extra = ["--dtype", "fp32"] if arguments[0] == "profile" else []
        assert main(["cascade", *map(str, arguments), *extra]) == 1
        assert mentions(capsys.readouterr().err, *named), (arguments, named)


def test_a_target_out_of_reach_names_the_tenant_and_the_best_plan(store, texts, capsys):
    profile, _ = profiled(store, texts)
    best = f"{profile.front[0].score:.4f}"
    assert main(["cascade", "select", "--store", str(store.folder), "--id", "pair", "--accuracy", "1"]) == 1
    assert mentions(capsys.readouterr().err, "'pair'", "1.0000", best)


@pytest.mark.parametrize("broken", ["no JSON", "[]", '{"plans": [], "asked": {"format": 3}, "report": {}}'])
def test_a_broken_profile_or_ladder_is_named(store, texts, broken):
    tenant = store.tenant("pair")
    folder = store.tenant_folder("pair", 1)
    for name, read in (("profile.json", read_profile), ("ladder.json", ladder_of)):
        (folder / name).write_text(broken)
        with pytest.raises(Broken, match=mentioning(folder / name)):
            read(store, tenant)


def test_a_ladder_of_levels_that_it_does_not_name_is_broken(store, texts):
    folder = store.tenant_folder("pair", 1)
    plan = asdict(Plan((Step(2),)))
    assert Plan.read(plan)
    (folder / "ladder.json").write_text(json.dumps({"levels": ["small"], "plans": [plan]}))
    with pytest.raises(Broken, match=mentioning(folder / "ladder.json")):
        ladder_of(store, store.tenant("pair"))


def test_kept_answers_depend_on_all_that_they_are_asked_with(tmp_path):
    made = []

    def compute():
        made.append(len(made))
        return Computed([np.full((1, 2), len(made), dtype=np.float32), np.zeros((3, 2), dtype=np.float32)], [np.empty(0)] * 2)

    kept = Kept(tmp_path, {"texts": "a"})
    first = kept(compute, level="x")
    for again in (kept(compute, level="x"), Kept(tmp_path, {"texts": "a"})(compute, level="x")):
        assert [own.tolist() for own in again.logits] == [own.tolist() for own in first.logits]
    assert [own.shape for own in again.received] == [(0,), (0,)]
    kept(compute, level="y"), Kept(tmp_path, {"texts": "b"})(compute, level="x")
    assert len(made) == 3


def test_too_few_texts_are_refused_before_anything_is_computed(store, texts, tmp_path):
    with pytest.raises(InvalidInput, match=mentioning(99, 100)):
        profiled(store, cut(texts, tmp_path / "few.jsonl", 99))
    assert not (store.tenant_folder("pair", 1) / "profile").exists()
