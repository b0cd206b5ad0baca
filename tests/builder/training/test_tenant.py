"""Tenants on a toy backbone: they learn every task, are scored as they are served, and wrong data are refused."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.evaluation.tenant import evaluate_tenant
from builder.packed_batches import packed_batches
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from builder.store.verification import store_parts
from builder.training import finetuning
from builder.training.bodies import PlotBody
from builder.training.examples import Reader
from builder.training.model import TenantModel
from builder.training.objectives import UNREAD
from builder.training.scores import Scores
from builder.training.tasks import training_task
from builder.training.tenant import build_tenant, warnings_of
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from testing.random_store import tokenizer_json
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.builder.tables.branches import build, some_lines
from tests.naming import names, naming
from tests.tasks import same_labels

pytestmark = pytest.mark.slow

pytest.importorskip("seqeval", reason="comes with the extra 'build'")
CPU = torch.device("cpu")
PARTS = WORDS[:8]


def classified(rng):
    """Returns a text whose label says which of two words it contains."""
    label = rng.choice(["left", "right"])
    words = rng.choices(WORDS[50:], k=rng.randint(2, 9))
    words.insert(rng.randrange(len(words) + 1), WORDS[0] if label == "left" else WORDS[1])
    return {"text": " ".join(words), "label": label}


def tagged(rng):
    """Returns a text whose tags mark the words among the first eight."""
    tokens = [rng.choice(PARTS if rng.random() < 0.4 else WORDS) for _ in range(rng.randint(2, 12))]
    return {"tokens": tokens, "tags": ["PART" if word in PARTS else "O" for word in tokens]}


def entities(rng):
    """Returns a text in which some words begin an entity and others continue it."""
    tokens, tags = [], []
    for _ in range(rng.randint(2, 6)):
        inside = rng.random() < 0.5
        for number in range(rng.randint(1, 3)):
            tokens.append(rng.choice((PARTS[4:] if number else PARTS[:4]) if inside else WORDS[20:]))
            tags.append(("I-P" if number else "B-P") if inside else "O")
    return {"tokens": tokens, "tags": tags}


def many(rng):
    """Returns a text whose labels are those of three words that it contains."""
    present = [i for i in range(3) if rng.random() < 0.5]
    words = rng.choices(WORDS[50:], k=rng.randint(2, 6)) + [WORDS[i] for i in present]
    rng.shuffle(words)
    return {"text": " ".join(words), "labels": [f"has-{i}" for i in present]}


def valued(rng):
    """Returns a text whose value is its share of words among the first eight, moved far from 0 and 1."""
    words = [rng.choice(PARTS if rng.random() < 0.5 else WORDS[50:]) for _ in range(6)]
    return {"text": " ".join(words), "label": 40 + sum(word in PARTS for word in words)}


def paired(rng):
    """Returns a pair whose label says which of two words the second text contains."""
    texts = [rng.choices(WORDS[50:], k=rng.randint(1, 4)) for _ in range(2)]
    number = rng.randint(0, 1)
    texts[1].insert(rng.randint(0, 1), WORDS[number])
    return {"text": " ".join(texts[0]), "text_pair": " ".join(texts[1]), "label": ["no", "yes"][number]}


def asked(rng):
    """Returns a question on a passage. The answer is the passage's run of words among the first eight."""
    passage = rng.choices(WORDS[50:], k=rng.randint(4, 12))
    answer = rng.choices(PARTS, k=rng.randint(1, 3))
    at = rng.randrange(len(passage))
    text = " ".join(passage[:at] + answer + passage[at:])
    start = len(" ".join(passage[:at])) + bool(at)
    answers = {"text": [" ".join(answer)], "answer_start": [start]}
    return {"text": rng.choice(WORDS[20:]), "text_pair": text, "answers": answers}


def perhaps_asked(rng):
    """Returns a question on a passage. If no word of the passage is among the first eight, it has no answer."""
    if rng.random() < 0.6:
        return asked(rng)
    passage = " ".join(rng.choices(WORDS[50:], k=rng.randint(5, 14)))
    return {"text": rng.choice(WORDS[20:]), "text_pair": passage, "answers": {"text": [], "answer_start": []}}


MAKERS = {"classify": classified, "tag": tagged}
TASKS = {
    "classify": ("classify", classified, "accuracy", 0.7),
    "pair": ("classify", paired, "accuracy", 0.7),
    "tag": ("tag", tagged, "macro_f1", 0.7),
    "bio": ("tag", entities, "entity_f1", 0.5),
    "multilabel": ("multilabel", many, "micro_f1", 0.65),
    "regress": ("regress", valued, "pearson", 0.55),
    "span": ("span", asked, "f1", 0.6),
    "span-or-none": ("span", perhaps_asked, "f1", 0.45),  # without any answer 0.4
    "cut": ("classify", classified, "accuracy", 0.7),
    "cut-values": ("regress", valued, "pearson", 0.55),
}
CUT = {"adapter": "lora", "body_rate": 3e-3}  # the upper layers learn, and the adapter is cut from their change


def write(path, examples):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def made(folder, task, count, seed):
    rng = random.Random(seed)
    return write(folder / f"{task}-{seed}.jsonl", [MAKERS[task](rng) for _ in range(count)])


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store")


def make_store(folder):
    lower, upper = random_backbone(CONFIG)
    with torch.no_grad():
        for stack in (lower, upper):
            for name, parameter in stack.named_parameters():
                if "norm" not in name:
                    parameter.mul_(8)  # with BERT's initial weights, tokens of this size would not influence each other
    store = Store.create(folder, "m", CONFIG, tokenizer_json(CONFIG.vocabulary), lower, upper)
    build(store, folder, "root", some_lines(200, seed=1))
    return store


def learn(store, task, train, dev=None, tenant="acme", **options):
    return build_tenant(store, tenant, "root", task, train, dev, rank=8, device=CPU, show_progress=False, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with a tenant of each task, and the test file of each."""
    folder = tmp_path_factory.mktemp("trained")
    store, tests = make_store(folder / "store"), {}
    for name, (task, maker, _, _) in TASKS.items():
        rng = random.Random(name)
        train, dev, tests[name] = (
            write(folder / f"{name}-{part}.jsonl", [maker(rng) for _ in range(count)])
            for part, count in (("train", 360), ("dev", 60), ("test", 60))
        )
        learn(store, task, train, dev, tenant=name, epochs=6, **(CUT if name.startswith("cut") else {}))
    return store, tests


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_learned(trained, name):
    store, tests = trained
    task, _, metric, least = TASKS[name]
    scores = evaluate_tenant(store, name, tests[name], CPU, show_progress=False).scores
    assert scores.metric == metric and scores.main > least
    report = next(store.report(tenant) for tenant in store.tenants() if tenant.id == name)
    assert report["task"] == task and report["dev"][metric] > least
    assert report["training"]["texts"] == 360 and report["seed"] == 0
    assert [entry["epoch"] for entry in report["history"]] == list(range(1, report["epochs_run"] + 1))
    best = max(report["history"], key=lambda entry: (entry["dev"], -entry["dev_loss"]))
    assert report["best_epoch"] == best["epoch"] <= report["kept_epoch"]
    assert (store.tenant_folder(name, 1) / "training.png").read_bytes().startswith(b"\x89PNG")


def test_scores_are_above_the_majority_share(trained):
    store, tests = trained
    for name in ("classify", "tag"):
        values = evaluate_tenant(store, name, tests[name], CPU, show_progress=False).scores.values
        assert values["accuracy"] > values["majority_share"] + 0.1


@pytest.mark.parametrize("name", TASKS)
def test_scored_answers_equal_served_answers(trained, tmp_path, name):
    """Answers and logits that are computed in packs equal those of the reference, text by text."""
    store, tests = trained
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32"))
    reference = Reference.open(tmp_path / "repository" / CONFIG.name / "1")
    evaluation = evaluate_tenant(store, name, tests[name], CPU, show_progress=False)
    tenant, examples = evaluation.tenant, evaluation.labelled.examples
    model = TenantModel(tenant.adapter_layout(CONFIG), tenant.head_layout(CONFIG), seed=0)
    model.load(*store.tenant_weights(tenant))
    reader = Reader(store, tenant.domain, tenant.domain_version)
    for chosen in packed_batches(evaluation.texts.lengths, 400, 20):
        pack = reader.pack(evaluation.texts, chosen, CPU)
        with torch.inference_mode():
            logits = model(PlotBody(store.upper().eval(), CONFIG.heads), pack)
        expected = torch.cat([reference.forward(examples[i].text, name, examples[i].pair) for i in chosen])
        assert torch.allclose(logits, expected, atol=1e-3)
    for example, answered in zip(examples, evaluation.answers, strict=True):
        assert same_labels(tenant.task, answered, reference.answer(example.text, name, example.pair).labels)


def test_the_same_seed_gives_the_same_bytes(store, tmp_path):
    train = made(tmp_path, "classify", 80, 1)
    files = []
    for tenant, seed in (("one", 4), ("two", 4), ("three", 5)):
        learn(store, "classify", train, tenant=tenant, epochs=2, seed=seed)
        folder = store.tenant_folder(tenant, 1)
        files.append([(folder / name).read_bytes() for name in ("adapter.safetensors", "head.safetensors")])
    assert files[0] == files[1] != files[2]


def test_of_epochs_with_dev_scores_that_do_not_differ_surely_the_last_is_kept(store, tmp_path, monkeypatch):
    """With 100 texts, 0.80 and 0.77 count as equal, but 0.80 and 0.75 do not."""
    train, dev = made(tmp_path, "classify", 60, 1), made(tmp_path, "classify", 20, 2)
    kept = {}
    for doubt in (0.0, 1.0):
        for tenant, told in (("near", (0.80, 0.77, 0.75)), ("far", (0.80, 0.75, 0.74)), ("rising", (0.70, 0.80, 0.79))):
            values = iter([*told, told[-1]])
            monkeypatch.setattr(
                finetuning, "evaluate", lambda *_, values=values: (Scores(100, "accuracy", {"accuracy": next(values)}), 1.0)
            )
            tenant = f"{tenant}-{doubt:g}"
            learn(store, "classify", train, dev, tenant=tenant, epochs=3, patience=3, doubt=doubt)
            report = next(store.report(other) for other in store.tenants() if other.id == tenant)
            kept[tenant] = (report["best_epoch"], report["kept_epoch"])
    assert kept == {
        "near-0": (1, 1), "far-0": (1, 1), "rising-0": (2, 2), "near-1": (1, 2), "far-1": (1, 1), "rising-1": (2, 3)
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, CUT])
def test_shared_layers_do_not_change(store, tmp_path, options):
    before = (store.folder / "upper.safetensors").read_bytes()
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1, **options)
    assert (store.folder / "upper.safetensors").read_bytes() == before


def test_a_cut_adapter_works_on_all_projections_or_on_the_given_places(store, tmp_path):
    train, held = made(tmp_path, "classify", 60, 1), []
    for tenant, options in (("all", {}), ("some", {"places": ("query", "ffn_in")})):
        made_of = learn(store, "classify", train, tenant=tenant, epochs=2, **CUT, **options)
        adapter, _ = store.tenant_weights(made_of)
        assert adapter[0].keys() == {f"{place}/{side}" for place in made_of.places for side in "ab"}
        held.append(store.report(made_of)["change_held"])
    assert made_of.places == ("query", "ffn_in") and len(adapter) == CONFIG.upper_layers
    assert all(0.2 < share < 1 for share in held) and held[0] != held[1]


def test_a_bottleneck_cannot_be_cut_from_upper_layers(store, tmp_path):
    with pytest.raises(InvalidInput, match=naming("'bottleneck'", "lora")):
        learn(store, "classify", made(tmp_path, "classify", 60, 1), body_rate=1e-4)


def test_rank_0_trains_only_a_head(store, tmp_path):
    train = made(tmp_path, "tag", 60, 1)
    tenant = build_tenant(store, "bare", "root", "tag", train, rank=0, epochs=1, device=CPU, show_progress=False)
    adapter, head = store.tenant_weights(tenant)
    assert adapter is None and head["weight"].shape == (2, CONFIG.hidden) and head["weight"].dtype == torch.float16
    with pytest.raises(InvalidInput, match="--rank"):
        build_tenant(store, "more", "root", "tag", train, rank=0, body_rate=1e-4, device=CPU, show_progress=False)


def test_a_command_interrupted_after_its_tenant_is_stored_makes_no_second_version(store, tmp_path, monkeypatch):
    train, save = made(tmp_path, "classify", 60, 1), Store.save_tenant

    def saved_and_cut(self, *given):
        save(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(Store, "save_tenant", saved_and_cut)
        with pytest.raises(KeyboardInterrupt):
            learn(store, "classify", train, epochs=1)
    assert learn(store, "classify", train, epochs=1).version == 1
    assert not (store.folder / "building/tenants/acme").exists()
    assert learn(store, "classify", train, epochs=2).version == 2


def test_an_interrupted_command_does_not_mistake_an_imported_tenant_for_its_own(store, tmp_path, monkeypatch):
    train = made(tmp_path, "classify", 60, 1)
    other = learn(store, "classify", train, tenant="other", epochs=1)
    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(Store, "save_tenant", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        learn(store, "classify", train, epochs=1)
    store.save_tenant(replace(other, id="acme"), *store.tenant_weights(other), {"task": "classify", "imported": {}})
    trained = learn(store, "classify", train, epochs=1)
    assert trained.version == 2 and "dev" in store.report(trained)


def test_a_training_continues_if_an_import_has_taken_its_version(store, tmp_path, monkeypatch, capsys):
    train = made(tmp_path, "classify", 60, 1)
    other = learn(store, "classify", train, tenant="other", epochs=1)
    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(Store, "save_tenant", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        learn(store, "classify", train, epochs=1)
    left = store.tenant_work_folder("acme") / "kept"
    left.write_text("a savepoint")
    store.save_tenant(replace(other, id="acme"), *store.tenant_weights(other), {"task": "classify", "imported": {}})
    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(Store, "save_tenant", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        learn(store, "classify", train, epochs=1)
    assert left.exists() and not capsys.readouterr().err
    assert learn(store, "classify", train, epochs=1).version == 2


def test_a_trained_store_can_be_verified(store, tmp_path):
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    parts = [part for part in store_parts(store.folder) if "tenants" in part.path.parts]
    assert {"tenant.json", "head.safetensors"} < {part.path.name for part in parts}
    assert (parts[0].path.parent / "training.png").exists()
    assert [wrong for part in parts for wrong in part.check(part.path, lambda done: None)] == []


def test_an_update_is_the_next_version_with_the_same_answers(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    assert learn(store, "classify", train, epochs=1).version == 1
    assert learn(store, "classify", made(tmp_path, "classify", 60, 2), epochs=1).version == 2
    more = write(tmp_path / "more.jsonl", [{"text": text, "label": label} for text, label in zip("abcd", "xyxy", strict=True)])
    with pytest.raises(InvalidInput, match=naming("'acme'", 2, "['x', 'y']", "['left', 'right']", "--id")):
        learn(store, "classify", more, epochs=1)
    with pytest.raises(InvalidInput, match=naming("'acme'", "classify", "tag", "--id")):
        learn(store, "tag", made(tmp_path, "tag", 60, 1), epochs=1)
    assert [tenant.version for tenant in store.tenants()] == [2]


def test_labels_unseen_in_training_are_named_with_their_line(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    other = write(tmp_path / "other.jsonl", [{"text": "a", "label": "left"}, {"text": "b", "label": "up"}])
    with pytest.raises(InvalidInput, match=naming(f"{other}:2", "'up'", train)):
        learn(store, "classify", train, other)
    learn(store, "classify", train, epochs=1)
    with pytest.raises(InvalidInput, match=naming(f"{other}:2", "'up'", "'acme'")):
        evaluate_tenant(store, "acme", other, CPU, show_progress=False)


def test_data_that_cannot_be_learned_are_refused(store, tmp_path):
    one = write(tmp_path / "one.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}])
    with pytest.raises(InvalidInput, match=naming(one, "'x'")):
        learn(store, "classify", one)
    few = write(tmp_path / "few.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    with pytest.raises(InvalidInput, match=naming(few, "--dev")):
        learn(store, "classify", few)
    with pytest.raises(InvalidInput, match=naming("'nobody'", store.folder)):
        evaluate_tenant(store, "nobody", few, CPU, show_progress=False)
    with pytest.raises(InvalidInput, match="'guess'"):
        learn(store, "guess", few)


def test_values_that_cannot_be_stored_or_do_not_differ_are_refused(store, tmp_path):
    same = write(tmp_path / "same.jsonl", [{"text": text, "label": 2} for text in "abc"])
    with pytest.raises(InvalidInput, match=naming(same, 2)):
        learn(store, "regress", same)
    far = write(tmp_path / "far.jsonl", [{"text": str(i), "label": 2000 + i} for i in range(5)])
    with pytest.raises(InvalidInput, match=naming(far, 2002)):
        learn(store, "regress", far, far)
    none = write(tmp_path / "none.jsonl", [{"text": "a", "labels": []}] * 3)
    with pytest.raises(InvalidInput, match=naming(none)):
        learn(store, "multilabel", none)


def test_options_that_make_no_sense_are_named(store, tmp_path):
    train = made(tmp_path, "classify", 20, 1)
    counts, rates = ("epochs", "patience", "batch_texts"), {"doubt": -1, "learning_rate": 0.0, "body_rate": -1, "dropout": 1.0}
    for option, value in [*((name, 0) for name in counts), *rates.items()]:
        with pytest.raises(InvalidInput, match=f"{option.split('_')[-1]} {value}"):
            learn(store, "classify", train, **{option: value})


def test_unanswerable_questions_are_learned_and_served_as_such(trained):
    store, tests = trained
    tenant = store.tenant("span-or-none")
    assert tenant.labels == ["start", "end", "none"] and store.tenant("span").labels == ["start", "end"]
    values = evaluate_tenant(store, "span-or-none", tests["span-or-none"], CPU, show_progress=False).scores.values
    assert values["unanswerable_right"] > 0.6 and values["answerable_f1"] > 0.3
    always = evaluate_tenant(store, "span", tests["span-or-none"], CPU, show_progress=False).scores.values
    assert always["unanswerable_right"] == 0


def test_the_kinds_of_questions_are_part_of_what_a_tenant_is(store, tmp_path):
    rng = random.Random(3)
    known = write(tmp_path / "known.jsonl", [asked(rng) for _ in range(30)])
    none = write(tmp_path / "none.jsonl", [{**asked(rng), "answers": {"text": [], "answer_start": []}} for _ in range(30)])
    both = write(tmp_path / "both.jsonl", [json.loads(line) for path in (known, none) for line in path.open()])
    with pytest.raises(InvalidInput, match=naming(none)):
        learn(store, "span", none, epochs=1)
    learn(store, "span", known, tenant="always", epochs=1)
    with pytest.raises(InvalidInput, match=naming("'always'", 1, "['none']")):
        learn(store, "span", both, tenant="always", epochs=1)
    learn(store, "span", both, tenant="perhaps", epochs=1)
    assert learn(store, "span", known, tenant="perhaps", epochs=1).labels == ["start", "end", "none"]


def test_an_answer_is_learned_in_the_windows_that_have_all_of_it(store, tmp_path):
    """A passage of 120 words has windows of words 0 to 59, 30 to 89 and 60 to 119."""
    words = [WORDS[30 + i] for i in range(120)]
    passage = " ".join(words)

    def asks(first, last):
        answer = " ".join(words[first : last + 1])
        return {"text": WORDS[0], "text_pair": passage, "answers": {"text": [answer], "answer_start": [passage.index(answer)]}}

    path = write(tmp_path / "long.jsonl", [asks(1, 2), asks(40, 41), asks(59, 60), asks(29, 30), asks(119, 119)])
    task = training_task("span")
    for labels, no in ((["start", "end"], [UNREAD, UNREAD]), (["start", "end", "none"], [0, 0])):
        texts = Reader(store, "root", 1).read(task.read(path), task, labels, show_progress=False)
        assert texts.cut == 0 and [example.line for example in texts.examples] == [1, 2, 3, 4, 5]
        assert texts.lengths.tolist() == [64] * 15
        targets = [text.targets.tolist() for text in texts.texts]
        assert [targets[i : i + 3] for i in range(0, 15, 3)] == [
            [[2, 3], no, no],
            [[41, 42], [11, 12], no],
            [no, [30, 31], no],
            [[30, 31], no, no],
            [no, no, [60, 60]],
        ]


def test_long_passages_are_learned(store, tmp_path):
    rng = random.Random(5)

    def long(rng):
        example = asked(rng)
        before, after = (" ".join(rng.choices(WORDS[50:], k=rng.randint(20, 60))) for _ in range(2))
        answers = {**example["answers"], "answer_start": [example["answers"]["answer_start"][0] + len(before) + 1]}
        return {**example, "text_pair": f"{before} {example['text_pair']} {after}", "answers": answers}

    train, dev, test = (
        write(tmp_path / f"{part}.jsonl", [long(rng) for _ in range(count)])
        for part, count in (("train", 360), ("dev", 60), ("test", 60))
    )
    tenant = learn(store, "span", train, dev, epochs=6)
    found = evaluate_tenant(store, "acme", test, CPU, show_progress=False)
    assert found.scores.main > 0.35 and len(found.answers) == 60
    report = store.report(tenant)
    assert (report["training"]["texts"], report["dev"]["texts"], report["training"]["texts_cut"]) == (360, 60, 0)


def test_uneven_labels_are_reported(store, tmp_path):
    rng = random.Random(0)
    examples = [{"text": " ".join(rng.choices(WORDS, k=4)), "label": "rare" if i % 30 == 0 else "often"} for i in range(90)]
    report = store.report(learn(store, "classify", write(tmp_path / "u.jsonl", examples), epochs=1))
    assert report["imbalance"] > 20
    assert names(warnings_of(report)[0], "'often'")
    assert warnings_of({**report, "imbalance": 2.0}) == []


def test_a_text_too_long_for_a_server_is_refused(store, tmp_path):
    train = write(tmp_path / "long.jsonl", [{"text": "a", "label": "x"}, {"text": "a " * 60_000, "label": "y"}])
    with pytest.raises(InvalidInput, match=naming(f"{train}:2", "100,000")):
        learn(store, "classify", train, train)


def test_long_texts_are_truncated_and_counted(store, tmp_path):
    rng = random.Random(0)
    examples = [classified(rng) for _ in range(40)]
    exact, longer = CONFIG.positions - 2, CONFIG.positions - 1
    examples += [{"text": " ".join(WORDS[:1] * length), "label": "left"} for length in (exact, longer, 300)]
    train = write(tmp_path / "long.jsonl", examples)
    report = store.report(learn(store, "classify", train, made(tmp_path, "classify", 20, 2), epochs=1))
    assert report["training"]["texts_cut"] == 2 and report["dev"]["texts_cut"] == 0


def test_a_word_without_a_token_counts_as_wrong(store, tmp_path):
    """A zero-width space is a word to a client and nothing to the tokenizer."""
    path = write(tmp_path / "odd.jsonl", [{"tokens": [WORDS[0], "\u200b", WORDS[60]], "tags": ["PART", "O", "O"]}])
    task = training_task("tag")
    reader = Reader(store, "root", 1)
    texts = reader.read(task.read(path), task, ["O", "PART"], show_progress=False)
    assert texts.texts[0].reading.tolist() == [1, UNREAD, 2]
    assert reader.pack(texts, np.array([0]), CPU).targets.tolist() == [1, UNREAD, 0]
    learn(store, "tag", made(tmp_path, "tag", 200, 1), epochs=1)
    assert evaluate_tenant(store, "acme", path, CPU, show_progress=False).scores.values["accuracy"] <= 0.6667
