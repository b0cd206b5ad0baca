"""Trainings that are interrupted while they save go on with the step that was lost, and end with the same numbers."""

import os
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

from builder.importing.checkpoint import Family
from builder.importing.matching import MatchingOptions, import_checkpoint
from builder.importing.tenant import ImportOptions
from builder.importing.texts import UnlabelledTexts
from builder.learning.distil import distil
from builder.learning.limits import Budget
from builder.learning.masked import further_pretrain
from builder.store import savepoint
from builder.tables.root import RootOptions, build_root
from builder.tasks.lookup import Reader
from builder.training.bodies import PlotBody
from builder.training.data import read_files
from builder.training.finetuning import TrainingOptions
from builder.training.teacher import taught
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from tests.builder.checkpoints import VOCABULARY, chained, same, save_tokenizer, weights
from tests.builder.stores import CPU, NO_TIME, some_lines
from tests.builder.training.small_tenants import CUT, learn, unexpected, write
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(bert, tmp_path_factory):
    """A store with a root of a saved BERT, and labelled texts: whether a text has its first word again."""
    folder = tmp_path_factory.mktemp("original")
    lines = [line.replace("水", "") for line in some_lines(60, 1)]
    (folder / "corpus.txt").write_text("\n".join(lines), "utf-8")
    store, _ = build_root(str(bert), [folder / "corpus.txt"], folder / "store", RootOptions(name="tiny"), NO_TIME, CPU)
    rows = [{"text": " ".join(line.split()[:9]), "label": "ab"[line.split()[0] in line.split()[1:9]]} for line in lines]
    return store, write(folder / "train.jsonl", rows)


def distilled(store, file, saved):
    checkpoint = load_checkpoint(store.model)
    lower, upper = split(checkpoint)
    documents = chained(checkpoint.config, 800, 16, seed=1)
    report = distil(checkpoint, lower, upper, documents, Budget(steps=8), 3, CPU, False, saved)
    return weights(lower, upper), report


def guessed(store, file, saved):
    checkpoint = load_checkpoint(store.model)
    (lower, upper), documents = split(checkpoint), chained(checkpoint.config, 800, 16, seed=1)
    given = checkpoint.config, lower, upper, None, "", documents, Budget(steps=8), 3, CPU, False, saved
    head, report = further_pretrain(*given)
    return weights(lower, head), report


def tuned(store, file, saved):
    """A teacher, and a tenant with all weights and random numbers that a training has: its adapter is cut."""
    data = read_files(store, "classify", file, None).looked_up(Reader(store, "root", 1), CPU, None, False)
    found = taught(PlotBody.of(store), data, TrainingOptions(rank=8, epochs=2, **CUT), saved, False)
    assert saved.with_name(f"teacher-{saved.name}").exists(), "the teacher was not saved"
    adapter, head = found.model.stored()
    learned = {f"{i}.{name}": part for i, layer in enumerate([*adapter, head]) for name, part in layer.items()}
    return learned, {**found.report, "dev": found.scores}


def matched(store, file, saved):
    """A checkpoint's tenant, which is named as the savepoint would be."""
    folder = Path(store.model).with_name("tuned")
    if not folder.exists():
        torch.manual_seed(0)
        BertForSequenceClassification.from_pretrained(store.model, num_labels=3).save_pretrained(folder)
        save_tokenizer(folder, VOCABULARY)
    given = UnlabelledTexts(file), ImportOptions(), MatchingOptions(rank=2, epochs=2, batch_texts=8, least=0)
    tenant, report = import_checkpoint(store, saved.stem, folder, Family(store.model, store.config), *given, CPU, False)
    adapter, head = store.tenant_weights(tenant)
    return {f"{i}.{name}": part for i, layer in enumerate([*adapter, head]) for name, part in layer.items()}, report


@pytest.mark.parametrize("train", [distilled, guessed, tuned, matched], ids=lambda train: train.__name__)
def test_an_interrupted_training_ends_with_the_same_numbers(original, tmp_path, monkeypatch, train):
    """It is interrupted at its begin, in its middle and at its end, each time before a savepoint gets its name."""
    saves, deaths, replace = 0, (), os.replace

    def dying(source, target):
        nonlocal saves
        saves += 1
        if saves in deaths:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(savepoint, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(os, "replace", dying)
    undisturbed, report = train(*original, tmp_path / "whole.pt")
    count, saves = saves, 0
    deaths = 2, count // 2 + 1, count - 1
    for _ in deaths:
        with pytest.raises(KeyboardInterrupt):
            train(*original, tmp_path / "learning.pt")
    found, again = train(*original, tmp_path / "learning.pt")
    assert saves == count + len(deaths), "it did not go on with the step that was lost"
    for one in (report, again):
        one["seconds"] = one.get("teacher", {})["seconds"] = one["texts_per_second"] = one["took"] = 0
    assert same(found, undisturbed) and again == report


def test_a_tenant_learns_the_answers_of_its_teacher(original):
    store, file = original
    options = {"epochs": 1, "teacher": "dedicated", "trainer": unexpected}
    learned = learn(store, "classify", file, **options)
    plain = learn(store, "classify", file, tenant="plain", epochs=1)
    heads = [store.tenant_weights(tenant)[1] for tenant in (learned, plain)]
    assert 0 <= store.report(learned)["teacher"]["dev"] <= 1 and not same(*heads)
    assert learn(store, "classify", file, **options) == learned  # nothing is learned anew
    for wrong in ({"teacher": "nobody"}, {"teacher": "dedicated", "grid": True}):
        with pytest.raises(InvalidInput, match=mentioning("--teacher", "dedicated", "--grid")):
            learn(store, "classify", file, **wrong)
