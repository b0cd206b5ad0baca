"""A checkpoint becomes a tenant: it is read as `transformers` reads it, and its answers are learned."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from builder.importing.adapter_import import ImportOptions
from builder.importing.agreement import Agreement, agreement, differing
from builder.importing.checkpoint import Family, digest, weight_files
from builder.importing.folders import Imported, write_page
from builder.importing.matching import TunedModel, Unlike, answers_of, import_checkpoint
from builder.importing.options import Matching
from builder.importing.reports import facts_of
from builder.importing.texts import MOST_BYTES, UnlabelledTexts, taught
from builder.learning.bodies import WholeBody
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.resumable import PLAN, write_json
from builder.store.store import Store
from builder.tasks.examples import Example
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.build import build_tenant, delete_tenant
from builder.training.data import Data
from hplm.adapters.layout import PROJECTIONS, adapter_layout
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from hplm.tenants.embedding import Embedding
from testing.reference import Reference
from tests.builder.checkpoints import SIZES
from tests.builder.importing.stores import (
    KINDS,
    LABELS,
    SEQUENCE,
    embedding,
    put,
    texts,
    tuned,
)
from tests.builder.stores import build, cut, full_disk, interrupted, nothing_looked_up, some_lines
from tests.builder.training.small_tenants import unexpected, write
from tests.engine.asker import Asker
from tests.support.device import DEVICE
from tests.support.families import SENTENCES, save_family
from tests.support.learning import by_one_step
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

TOKENS, QUESTION = "ForTokenClassification", "ForQuestionAnswering"


def family_of(store: Store) -> Family:
    return Family(store.model, store.config)


def test_a_change_that_fits_is_kept_whole(store, tmp_path):
    family = family_of(store)
    found = family.read(tuned(tmp_path / "tuned"))
    layout = adapter_layout(store.config, "lora", SIZES["hidden_size"], tuple(PROJECTIONS))
    adapter, kept = family.change(found, layout)
    assert kept == pytest.approx(1, abs=1e-4) and 0 < found.distance < 0.5
    for number, layer in enumerate(adapter):
        name = f"layers.{store.config.lower_layers + number}.ffn_in.weight"
        wanted = found.checkpoint.weights[name] - family.base.weights[name]
        assert torch.allclose(layer["ffn_in/b"] @ layer["ffn_in/a"], wanted, atol=1e-4)
    assert family.change(found, adapter_layout(store.config, "lora", 2, tuple(PROJECTIONS)))[1] < 0.9


def imported(store: Store, folder: Path, file: Path, test: Path | None = None, **matching: object):
    given = UnlabelledTexts([file]), ImportOptions(test=test), Matching(**matching)
    return import_checkpoint(store, "acme", folder, family_of(store), *given, DEVICE)


def test_an_import_learns_is_stored_and_then_changes_nothing(store, tmp_path, monkeypatch):
    states, packs = WholeBody.states, []
    monkeypatch.setattr(WholeBody, "states", lambda body, pack, *more: packs.append(pack) or states(body, pack, *more))
    folder, file = tuned(tmp_path / "Tuned $_$", id2label=dict(enumerate(LABELS))), texts(tmp_path)
    test = write(tmp_path / "test.jsonl", ({"text": line, "label": LABELS[0]} for line in some_lines(20, 3)))
    matching = {"rank": 8, "epochs": 6, "learning_rate": 3e-3, "least": 0}
    tenant, report = imported(store, folder, file, **matching)
    assert len(packs) == 2, "the checkpoint is asked for its scales, and once for its states"
    assert (tenant.version, tenant.labels, tenant.rank, tenant.head_function) == (1, LABELS, 8, "tanh")
    assert store.report(tenant) == report and not store.tenant_work_folder("acme").exists()
    assert report["exams"][-1]["loss"] < report["exams"][0]["loss"], "it did not come nearer to the checkpoint"
    assert report["texts"]["learned"] + report["texts"]["judged"] <= 120 and report["texts"]["judged"] == 50
    assert report["after"]["answers"] == 50 and report["after"]["agreement"] == report["exams"][-1]["score"]
    assert report["bytes"]["tenant"] < report["bytes"]["checkpoint"]
    page = store.tenant_folder("acme", 1) / "report.html"
    shown = "answers that are the checkpoint", "KL", f"{report['after']['divergence']:.3f}"
    assert mentions(page.read_text("utf-8"), *shown)
    assert imported(store, folder, file, **matching) == (tenant, report)
    same, tested = imported(store, folder, file, test, **matching)
    assert same == tenant and tested["test"]["checkpoint"]["rows"] == tested["test"]["tenant"]["rows"] == 20
    told = "tenant accuracy " + ", checkpoint accuracy ".join(f"{one['accuracy']:.3f}" for one in tested["test"].values())
    same = tested["tested"]
    shown = f"{same['agreement']:.1%} +- {same['off']:.1%} of 20"
    assert facts_of(tested)["scores on --test"] == told
    assert facts_of(tested)["answers to --test that are the checkpoint's"] == shown
    assert tested["tested"]["answers"] == 20 and store.report(tenant) == report
    other = ["blue", "red", "green"]
    put(folder / "config.json", id2label=dict(enumerate(other)), label2id={label: row for row, label in enumerate(other)})
    with by_one_step():
        again, _ = imported(store, folder, file, rank=4, least=0)
    assert (again.version, again.rank, again.labels) == (2, 4, LABELS), "clients know logits by the order of labels"
    head, own = (store.tenant_weights(one)[1]["weight"].float() for one in (tenant, again))
    assert torch.allclose(own, head[[other.index(label) for label in LABELS]], atol=0.1), "rows of the same weights, moved"


@pytest.mark.parametrize(
    ("pooling", "modules", "limited"),
    [
        ("mean_tokens", KINDS, ("sentence_bert_config.json", "max_seq_length")),
        ("cls_token", KINDS[:2], ("tokenizer_config.json", "model_max_length")),
    ],
)
def test_an_embedding_model_is_matched_by_its_vectors(store, tmp_path, pooling, modules, limited):
    folder = embedding(tmp_path / "near", pooling, modules, prompts={"query": "wa ", "passage": ""}, default_prompt_name=None)
    put(folder / limited[0], **{limited[1]: 9})
    lines = some_lines(24, 3)
    test = write(tmp_path / "test.jsonl", ({"text": line, "positive": line.upper()} for line in lines))
    with by_one_step():
        tenant, report = imported(store, folder, texts(tmp_path), test, rank=32, least=0)
    prefixes = {"query": "wa ", "passage": ""}
    own = Embedding(32, "mean" if "mean" in pooling else "first", len(modules) == 3, prefixes=prefixes, limit=9)
    assert (tenant.task, tenant.labels, tenant.embedding, tenant.has_head) == ("embed", [], own, False)
    assert store.known_tenant("acme") == tenant and store.knowledge(tenant).embedding == own
    after = report["after"]
    assert after["answers"] == 50 and 0.5 < after["agreement"] <= 1 and "divergence" not in after
    assert (
        report["test"]["tenant"]["metric"] == "ndcg10"
        and "cosine" in " ".join(facts_of(report))
        and "9" in facts_of(report).values()
    )
    model = transformers.BertModel.from_pretrained(folder).eval()  # the vectors of the checkpoint, by transformers alone
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = family_of(store).read(folder)
    models, examples = [TunedModel.of_checkpoint(found, DEVICE)], [Example(test, 1, line, line) for line in lines]
    task = training_task("embed").of(replace(own, prefixes={}))
    _, (rows,) = answers_of(models, examples, Reader(store, "root", 1), [], task)
    for line, (_, vectors) in zip(lines, rows, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(line, truncation=True, max_length=9, return_tensors="pt")).last_hidden_state[0]
        wanted = states.mean(0) if "mean" in pooling else states[0]
        assert np.allclose(vectors[0], wanted / wanted.norm() if len(modules) == 3 else wanted, atol=1e-4)
    with pytest.raises(Unlike, match=mentioning("cosines", folder, "--least")):
        imported(store, folder, texts(tmp_path), rank=1, epochs=1, learning_rate=1e-9, least=1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pooling": "max_tokens"}, ["max_tokens", "mean or cls"]),
        ({"modules": ("Transformer", "Pooling", "Dense")}, ["Dense"]),
        ({"modules": ("Transformer", "Normalize", "Pooling")}, ["modules.json", "Normalize, Pooling"]),
        ({"prompts": 3}, ["config_sentence_transformers.json", "prefixes"]),
        ({"prompts": {"query": "a"}, "default_prompt_name": "title"}, ["'title'"]),
    ],
    ids=str,
)
def test_what_no_tenant_does_with_states_is_refused_by_name(store, tmp_path, change, named):
    folder = embedding(tmp_path / "near", **change)
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        family_of(store).read(folder)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
    ],
)
def test_a_cross_encoder_with_one_label_becomes_a_reranker(store, tmp_path, config, activation):
    folder, lines = tuned(tmp_path / "ranks", num_labels=1), some_lines(120, 7)
    put(folder / "config.json", **config)
    pairs = [{"text": " ".join(line.split()[:4]), "text_pair": " ".join(line.split()[4:9])} for line in lines]
    test = write(tmp_path / "test.jsonl", ({**pair, "label": number / 9} for number, pair in enumerate(pairs[:30])))
    with by_one_step():
        tenant, report = imported(store, folder, write(tmp_path / "texts.jsonl", pairs), test, rank=32, least=0)
    assert (tenant.task, tenant.labels, report["imported"]["activation"]) == ("regress", ["value"], activation)
    assert report["test"]["tenant"]["rows"] == 30 and facts_of(report)["activation behind the logit"] == activation
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32"))
    reference, asker = Reference.open(tmp_path / "repository/tiny/1"), Asker(tmp_path / "repository/tiny/1")
    texts_, passages = ([pair[name] for pair in pairs[:5]] for name in ("text", "text_pair"))
    found = [float(one.labels[0]) for one in asker.wait(asker.ask("acme", texts_, passages))]
    asker.close()
    expected = [float(reference.forward(text, "acme", passage)) for text, passage in zip(texts_, passages, strict=True)]
    assert found == pytest.approx(expected, abs=1e-3) and len({round(one, 2) for one in found}) > 1


def test_a_model_of_vectors_has_no_labels_and_no_other_task(store, tmp_path):
    folder = embedding(tmp_path / "near")
    digests = [digest(folder)]
    for name in ("1_Pooling/config.json", "config_sentence_transformers.json"):
        put(folder / name, changed=True)
        digests.append(digest(folder))
    assert len({*digests}) == 3, "it would count as imported"
    put(folder / "1_Pooling/config.json", include_prompt=False)
    with pytest.raises(InvalidInput, match=mentioning("include_prompt")):
        family_of(store).read(folder)
    put(folder / "1_Pooling/config.json", include_prompt=True)
    for given in ((["a", "b"], None), (None, "classify")):
        with pytest.raises(InvalidInput, match=mentioning("modules.json", "--labels", "--task")):
            family_of(store).read(folder, *given)
    (folder / "modules.json").unlink()
    with pytest.raises(InvalidInput, match=mentioning("BertModel", "modules.json")):
        family_of(store).read(folder)


@pytest.mark.parametrize(("disk", "most"), [(MOST_BYTES, MOST_BYTES), (1000, MOST_BYTES), (MOST_BYTES, 1000)])
@torch.no_grad()
def test_a_checkpoint_is_asked_once_if_there_is_room_for_its_states(store, tmp_path, disk, most):
    """Otherwise for each batch. Its states are the same, but for the rounding to 16 bits."""
    has_room = disk == most
    reader, task, packs = Reader(store, "root", 1), training_task("classify").unlabelled(), []
    read, _ = UnlabelledTexts([texts(tmp_path)]).divided(reader, task, LABELS, 100, 0)
    data = Data(reader, task, LABELS, read, read, DEVICE)
    model = TunedModel.of_checkpoint(family_of(store).read(tuned(tmp_path / "tuned")), DEVICE)
    with full_disk(disk):
        states_of = taught(lambda pack: packs.append(pack) or model.through(pack)[0], data, tmp_path, most)
    assert len(packs) == has_room
    for chosen in np.array_split(np.random.default_rng(0).permutation(len(read.texts)), 3):
        pack = reader.pack(read, chosen, DEVICE)
        for own, wanted in zip(states_of(chosen, pack), model.through(pack)[0], strict=True):
            assert (own - wanted).norm() < 0.03 * wanted.norm()
    assert len(packs) == (1 if has_room else 3)


@pytest.mark.parametrize(
    "family, pooling", [("modernbert", "mean"), ("modernbert", "cls"), ("eurobert", "mean"), ("eurobert", "late")]
)
@torch.no_grad()
def test_a_classifier_is_asked_as_transformers_asks_it(tmp_path, family, pooling):
    base, folder, text = tmp_path / "base", tmp_path / "tuned", Example(tmp_path / "texts", 1, "the cat sat on the mat", None)
    save_family(base, family, "ForSequenceClassification", num_labels=3)
    stock = save_family(folder, family, "ForSequenceClassification", num_labels=3, classifier_pooling=pooling)
    made = load_checkpoint(str(base), "tiny", 1)
    store = Store.create(tmp_path / "store", str(base), made.config, made.tokenizer_json, *split(made))
    build(store, tmp_path, "root", [*SENTENCES] * 5)
    if pooling == "late":
        with pytest.raises(InvalidInput, match=mentioning("'late'", "'bos'", "'mean'")):
            family_of(store).read(folder)
        return
    teacher, reader = TunedModel.of_checkpoint(family_of(store).read(folder), DEVICE), Reader(store, "root", 1)
    read = reader.read([text], training_task("classify").unlabelled(), ["a", "b", "c"])
    pack = reader.pack(read, [0], DEVICE)
    wanted = stock(pack.tokens[None].cpu()).logits
    for found in (teacher.through(pack)[1], teacher.own(teacher.body, pack)):
        assert torch.allclose(found.cpu(), wanted, atol=1e-3)


def test_an_imported_tenant_learns_labels_beside_its_checkpoints_answers(store, tmp_path):
    """Nearly all labels are the same: without a teacher the tenant learns only that. The checkpoint orders them otherwise."""
    folder, file = tuned(tmp_path / "Tuned", id2label=dict(enumerate(LABELS))), texts(tmp_path)
    with by_one_step():
        imported(store, folder, file, rank=8, least=0)
    other = LABELS[::-1]
    put(folder / "config.json", id2label=dict(enumerate(other)), label2id={label: row for row, label in enumerate(other)})
    given = file.read_text("utf-8").splitlines()
    labels = [2, 1] + [0] * (len(given) - 2)
    rows = ({"text": line, "label": LABELS[label]} for line, label in zip(given, labels, strict=True))
    train = write(tmp_path / "train.jsonl", rows)
    options = {"epochs": 3, "from_version": 1, "learning_rate": 0.01, "device": DEVICE}
    made = [build_tenant(store, "acme", None, None, train, train, teacher=own, **options) for own in (None, str(folder))]
    assert [one.labels for one in made] == [LABELS, LABELS]
    task, teacher = training_task("classify"), family_of(store).read(folder).with_labels(LABELS)
    models = [TunedModel.of_checkpoint(teacher, DEVICE), *(TunedModel.of_tenant(store, one, DEVICE) for one in made)]
    data, (wanted, *found) = answers_of(models, task.read(train), Reader(store, "root", 1), LABELS, task)
    apart = [agreement(data, own, wanted).divergence for own in found]
    assert apart[1] < 0.5 * apart[0], "the teacher's answers were not learned"
    right = np.equal([logits.argmax() for _, logits in wanted], labels).mean()
    assert store.report(made[1])["teacher"] == {"dev": pytest.approx(right, abs=1e-4), "checkpoint": str(folder)}
    put(folder / "config.json", id2label={0: "red", 1: "green", 2: "black"})
    far = tuned(tmp_path / "far", change=2.0, id2label=dict(enumerate(LABELS)))
    for other, words in ((folder, ["black", "blue"]), (far, [far, "differ", "fine-tuned"])):
        with nothing_looked_up(), pytest.raises(InvalidInput, match=mentioning("--teacher", *words)) as caught:
            build_tenant(store, "acme", None, None, train, train, teacher=str(other), **{**options, "epochs": 2})
        assert "--root" not in str(caught.value)


@pytest.mark.usefixtures("one_step")
def test_an_import_keeps_its_domain_while_it_learns_and_ends_no_training(store, tmp_path, capsys):
    imported(store, tuned(tmp_path / "tuned"), texts(tmp_path, 60), rank=1, least=0)
    (training := (working := store.tenant_work_folder("acme")) / "training").mkdir(parents=True)
    for rank in (2, 3):
        cut(store, imported, tmp_path / "tuned", texts(tmp_path, 60), at="save_tenant", rank=rank, least=0)
    assert mentions(capsys.readouterr().err, "acme", "import", "other data or options")
    (user,) = [user for user in store.users()["root", 1] if str(working) in user]
    assert str(working / "import") in user
    with pytest.raises(InvalidInput, match=r"'acme'.*/import: finish"):
        delete_tenant(store, "acme")
    write_json(left := training / PLAN, {"version": 1})
    imported(store, tmp_path / "tuned", texts(tmp_path, 60), rank=3, least=0)
    assert [*working.rglob("*")] == [training, left]


@pytest.mark.usefixtures("one_step")
def test_a_tenant_that_answers_otherwise_is_stored_only_if_asked(store, tmp_path, monkeypatch):
    """A refused import keeps what it has learned beside its report, until it is stored or the checkpoint changes."""
    folder, file = tuned(tmp_path / "tuned", change=0.06), texts(tmp_path)
    for _ in range(2):  # the second time from what the first has left
        with pytest.raises(Unlike, match=mentioning("--least 1", "--texts", "--rank")) as caught:
            imported(store, folder, file, rank=1, least=1)
    assert store.tenant("acme") is None and caught.value.report["after"]["agreement"] < 1
    assert not store.tenant_work_folder("acme").exists() and store.users()["root", 1] == []
    refused = store.folder / "refused"
    (kept,) = refused.iterdir()
    learned = torch.load(kept)["weights"]
    with monkeypatch.context() as patch:
        patch.setattr("builder.importing.matching.train", unexpected)
        patch.setattr("builder.importing.texts.UnlabelledTexts.divided", unexpected)
        tenant, report = imported(store, folder, file, rank=1, least=0)
    assert store.tenant("acme") == tenant and report["after"] == caught.value.report["after"]
    assert not any(refused.iterdir()) and report["imported"]["from"] == str(folder)
    assert all(torch.equal(own, learned[1][name]) for name, own in store.tenant_weights(tenant)[1].items())
    with pytest.raises(Unlike, match=mentioning("--least 1", "hplm tenant delete")) as caught:
        imported(store, folder, file, rank=1, least=1)
    refused = Imported("acme", folder, None, caught.value.report, str(caught.value))
    assert store.tenant("acme") == tenant and "not stored" not in write_page(store, [refused]).read_text("utf-8")
    assert imported(store, folder, file, rank=1, least=0) == (tenant, report)


@pytest.mark.usefixtures("one_step")
def test_an_import_that_is_killed_at_its_end_and_then_refused_can_be_deleted(store, tmp_path, monkeypatch):
    folder, file = tuned(tmp_path / "tuned", change=0.06), texts(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("builder.store.step.Step.clear", interrupted)
        imported(store, folder, file, rank=1, least=0)
    with pytest.raises(Unlike, match=mentioning("--least 1", "hplm tenant delete")):
        imported(store, folder, file, rank=1, least=1)
    assert delete_tenant(store, "acme") == [1]


@pytest.mark.parametrize(
    ("ending", "config", "task"),
    [
        (TOKENS, {}, "tag"),
        (SEQUENCE, {"problem_type": "multi_label_classification"}, "multilabel"),
        (SEQUENCE, {"num_labels": 1}, "regress"),
        (QUESTION, {"num_labels": 2}, "span"),
    ],
)
@pytest.mark.usefixtures("one_step")
def test_a_checkpoint_of_each_task_becomes_a_tenant(store, tmp_path, ending, config, task):
    folder, file = tuned(tmp_path / "tuned", ending, **config), texts(tmp_path, 60)
    if task == "span":
        with pytest.raises(InvalidInput, match=mentioning(file, "text_pair")):
            imported(store, folder, file)
        lines = file.read_text("utf-8").splitlines()
        file = write(tmp_path / "pairs.jsonl", ({"text": line[:20], "text_pair": line} for line in lines))
    tenant, report = imported(store, folder, file, rank=4, least=0)
    assert (tenant.task, len(tenant.labels)) == (task, {"tag": 3, "multilabel": 3, "regress": 1, "span": 2}[task])
    assert report["after"]["answers"] == report["texts"]["judged"] * {"tag": 9, "multilabel": 3}.get(task, 1)


@pytest.mark.parametrize("way", ["default labels", "numbers", "bin", "shards"])
def test_the_files_of_other_releases_are_read(store, tmp_path, way):
    """Of two labels without names transformers 4 saves none."""
    folder = tuned(tmp_path / "tuned", num_labels=2)
    stock, config = transformers.BertForSequenceClassification.from_pretrained(folder), folder / "config.json"
    if way == "default labels":
        stored = json.loads(config.read_text())
        config.write_text(json.dumps({name: stored[name] for name in stored.keys() - {"id2label", "label2id"}}))
    elif way == "numbers":
        put(config, id2label={"0": 0, "1": 1}, label2id={"0": 0, "1": 1})
    else:
        (folder / "model.safetensors").unlink()
        (folder / "training_args.bin").write_bytes(b"not weights")
        if way == "bin":
            torch.save(stock.state_dict(), folder / "pytorch_model.bin")
        else:
            stock.save_pretrained(folder, max_shard_size="20KB")
    found = family_of(store).read(folder)
    assert found.labels == (["0", "1"] if way == "numbers" else ["LABEL_0", "LABEL_1"])
    assert torch.allclose(found.head.weights["weight"], stock.classifier.weight, atol=1e-3)
    assert all("training_args" not in file.name for file in weight_files(folder))


def test_agreement_counts_what_a_client_would_see():
    """By hand: of three texts, two have the same label, and the checkpoint is sure of the first."""
    spans = np.zeros((1, 3), dtype=np.int32)

    def of(task: str, *sides: list[list[float]]) -> Agreement:
        rows = ([(spans, np.array([logits], dtype=np.float32)) for logits in side] for side in sides)
        return agreement(SimpleNamespace(task=training_task(task)), *rows)

    own, wanted = [[1, 0], [0, 5], [0, 1]], [[5, 0], [0, 1], [1, 0]]
    found = of("classify", own, wanted).described()
    assert found["agreement"] == pytest.approx(2 / 3, abs=1e-4) and found["sure"] == pytest.approx(1 / 3, abs=1e-4)
    assert (found["where_sure"], found["elsewhere"]) == (1.0, 0.5) and found["divergence"] > 0
    many = of("multilabel", own, wanted)
    assert (many.described()["answers"], many.same.tolist()) == (6, [True, True, True, True, False, False])
    assert of("regress", [[1.0], [2.0], [3.1]], [[1.01], [2.0], [4.0]]).same.tolist() == [True, True, False]


def test_tags_that_differ_are_shown_also_of_texts_in_which_a_word_has_no_token():
    spans, task = np.array([[1, 0, 1], [-1, 2, 3]], dtype=np.int32), training_task("tag")
    data = SimpleNamespace(task=task, labels=["O", "B"], dev=SimpleNamespace(examples=[Example(Path("file"), 1, "a \u200b")]))
    own, wanted = ([(spans, np.array([logits, [0, 0]], dtype=np.float32))] for logits in ([2, 0], [0, 2]))
    (shown,) = differing(data, own, wanted)
    assert (shown["tenant"], shown["checkpoint"], shown["sure"]) == ("O, ", "B, ", 0.881) and not differing(data, own, own)
