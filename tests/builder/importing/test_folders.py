"""Folders of many checkpoints: each is imported or named, without its code, and a plan says the same beforehand."""

import errno
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from builder.importing.adapter_import import ImportOptions
from builder.importing.folders import Importer, named, write_page
from builder.importing.options import Matching
from builder.importing.reports import advice
from builder.store.pack import pack_root
from hplm.errors import InvalidInput
from hplm.lookup.lookup import LONGEST_TEXT
from tests.builder.checkpoints import SIZES, save_tokenizer
from tests.builder.importing.stores import (
    FIXTURES,
    LABELS,
    SEQUENCE,
    changed,
    put,
    put_tensors,
    texts,
    tuned,
)
from tests.builder.stores import add_domain, corpus, grow
from tests.builder.training.small_tenants import write
from tests.support.device import DEVICE
from tests.support.families import save_family
from tests.support.here import Here
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


class Harmful:
    """A pickle of it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


OWN_CODE = {f"Auto{part}": f"own.{part}" for part in ("Config", "Model", f"Model{SEQUENCE}", "Tokenizer")}
# Copies of a good folder that cannot be imported: another field of its configuration or content of a file, and what is named.
FIELDS = {
    "architecture": ({"model_type": "deberta"}, ["'deberta'", "distances", "roberta"]),
    "class": ({"architectures": ["BertForMaskedLM"]}, ["BertForMaskedLM", SEQUENCE]),
    "own-class": ({"architectures": ["MyBertForSequenceClassification"]}, ["MyBert", "own"]),
    "code": ({"model_type": "own", "auto_map": OWN_CODE}, ["'own'"]),
    "code-and-class": ({"architectures": ["OwnForSequenceClassification"], "auto_map": OWN_CODE}, ["Own", "own"]),
    "decoder": ({"is_decoder": True}, ["decoder"]),
    "labels": ({"id2label": {"0": "a", "1": "a", "2": "b"}, "label2id": {"a": 1, "b": 2}}, ["--labels"]),
    "unnumbered": ({"id2label": {"0": "a", "1": "b", "3": "c"}, "label2id": {"a": 0, "b": 1, "c": 3}}, ["--labels"]),
    "counted": ({"id2label": dict(enumerate("abcd")), "label2id": None}, ["config.json", "labels"]),
    "typed": ({"hidden_size": "large"}, ["typed"]),
}
CONTENTS = {
    "broken": ("model.safetensors", b"no tensors", ["broken"]),
    "cut-config": ("config.json", b"{", ["JSON"]),
    "cut-tokenizer": ("tokenizer.json", b'{"model": 3}', ["cut-tokenizer", "again"]),
    "weightless": ("model.safetensors", None, ["no weights"]),
    "pickled": ("model.safetensors", None, ["pickled"]),
}
OTHERS = {
    "pickled-adapter": ["adapter_model.bin"], "far": ["differ", "--root MODEL"], "words": ["vocabulary", "--root MODEL"],
    "other-family": ["a roberta (3 layers of width 24", "hplm import --root roberta-base"], "smaller": ["--root"],
    "empty": ["adapter_config"], "dangling": ["adapter_config"], "0-locked": ["denied"], "many-labels": ["5,000", "4,096"],
    "no-tokenizer": ["models/no-tokenizer", "tokenizer.json", "vocab.txt", "copy"],
    "not-finite": ["not finite", "layer.1", "not-finite"],
}  # fmt: skip


def make_odd(folder: Path, good: Path, harm: Path) -> None:
    """Makes these folders. Two pickles and two models of own code would make the file `harm`."""
    for name, (fields, _) in FIELDS.items():
        put(shutil.copytree(good, folder / name) / "config.json", **fields)
    for name, (file, content, _) in CONTENTS.items():
        (path := shutil.copytree(good, folder / name) / file).unlink()
        if content is not None:
            path.write_bytes(content)
    shutil.copytree(FIXTURES / "peft-tag-patterns", folder / "pickled-adapter")
    for file in ("pickled/pytorch_model.bin", "pickled-adapter/adapter_model.bin"):
        (folder / file).write_bytes(pickle.dumps(Harmful(harm), protocol=2))
    for name in ("code", "code-and-class"):
        (folder / name / "own.py").write_text(f"import pathlib\npathlib.Path({str(harm)!r}).touch()\n")
    put(folder / "code-and-class" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]})
    tuned(folder / "far", change=2.0)
    tuned(folder / "many-labels", num_labels=5000)
    infinite = {"bert.encoder.layer.1.output.dense.weight": lambda own: own / 0}
    put_tensors(shutil.copytree(good, folder / "not-finite") / "model.safetensors", **infinite)
    for file in shutil.copytree(good, folder / "no-tokenizer").glob("*token*"):
        file.unlink()
    save_tokenizer(tuned(folder / "words"), SIZES["vocab_size"] - 20)
    save_family(folder / "other-family", "roberta", SEQUENCE)
    put(folder / "other-family" / "config.json", _name_or_path="roberta-base")  # as transformers 4 has saved it
    save_family(folder / "smaller", "bert", SEQUENCE)
    for name in ("empty", ".git", "日本", "Twin", "twin", "0-locked"):
        (folder / name).mkdir()
    (folder / "dangling").symlink_to(folder / "nowhere")


def test_a_folder_whose_import_was_interrupted_comes_last(store, tmp_path):
    """It may be the one that takes too much memory."""
    asked = []

    class Listing(Here):
        def submit(self, job, *given):
            asked.append(given[0])
            return super().submit(job, *given)

    store.tenant_work_folder("acme").mkdir(parents=True)
    importer = Importer(store, ImportOptions(), Matching(), None, DEVICE)
    found = list(importer.all([(name, tmp_path / name) for name in ("acme", "beta", "city")], Listing()))
    assert asked == ["beta", "city", "acme"] and all("config.json" in one.refused for one in found)


@pytest.mark.usefixtures("one_step")
def test_what_cannot_be_imported_is_named_and_the_others_are(store, tmp_path, monkeypatch):
    """A pickle runs no code, and neither does a model that brings some. A plan says the same of each."""
    folder, harm = tmp_path / "models", tmp_path / "harm"
    make_odd(folder, tuned(folder / "Good One"), harm)
    wanted = {name: row[-1] for name, row in (FIELDS | CONTENTS).items()} | OTHERS
    wanted |= {str(folder / name): [f"models/{name}", "--id"] for name in ("日本", "Twin", "twin")}
    stat = os.stat

    def denied(path, **options):
        if str(folder / "0-locked") in str(path) and Path(path).name != "0-locked":
            raise PermissionError(errno.EACCES, "permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", denied)  # the super-user may read all
    lora = changed(tmp_path, "peft-everywhere", "config.json", {"id2label": dict(enumerate(LABELS))})
    shutil.copytree(lora, folder / "adapter")
    importer = Importer(store, ImportOptions(), Matching(rank=2, least=0), texts(tmp_path, 60), DEVICE)
    found = list(importer.all(named([folder]), Here()))
    assert {one.folder: one.refused for one in importer.plan(named([folder]))} == {one.folder: one.refused for one in found}
    (few := tmp_path / "few.txt").write_text("one text")
    with pytest.raises(InvalidInput, match=mentioning(few, 50)):
        list(replace(importer, given=few).plan(named([folder])))
    shutil.copy(few, folder / "Good One" / "texts.jsonl")
    assert {one.id for one in importer.plan(named([folder])) if one.refused} == wanted.keys() | {"good-one"}
    assert {one.id for one in found if one.tenant is not None} == {"good-one", "adapter"} == set(store.tenant_ids())
    assert {one.id for one in found if one.tenant is None} == wanted.keys()
    for one in found:
        for part in wanted.get(one.id, ()):
            assert part in one.refused, (one.id, one.refused)
    assert not harm.exists()
    page = write_page(store, found).read_text("utf-8")
    assert f"good-one (from {folder / 'Good One'})" in page and "BertForMaskedLM" in page
    report = store.report(store.tenant("good-one"))
    assert f"<td>{report['after']['divergence']:.3f}</td>" in page and "KL" in page and advice(report)[:30] in page
    shutil.copytree(folder / "Good One", tmp_path / "elsewhere" / "good-one")
    (other,) = importer.all(named([tmp_path / "elsewhere"]), Here())
    assert other.tenant is None and "--id" in other.refused, "another folder of the same name must not replace the tenant"


@pytest.mark.usefixtures("one_step")
def test_without_texts_a_checkpoint_is_matched_by_those_in_its_folder_or_the_corpus_of_its_domain(store, tmp_path):
    """Of its next version too. Documents may be longer than texts."""
    importer = Importer(store, ImportOptions("bio"), Matching(rank=2, least=0), None, DEVICE)
    folder, files = tuned(tmp_path / "tuned"), [corpus(tmp_path, seed, lines=30) for seed in (1, 2)]
    with files[1].open("a") as long:
        long.write("\n" + "a " * LONGEST_TEXT)
    add_domain(store, "bio", 1)
    grow(store, "bio", 2)
    assert store.corpus("bio", 2) == files
    assert importer.one("acme", folder)[1]["texts"]["judged"] == 30
    pack_root(store, tmp_path / "root.tar")
    files[0].rename(tmp_path / "elsewhere")
    importer = replace(importer)
    (gone,) = importer.all([("acme", folder)], Here())
    assert mentions(gone.refused, "'bio'", "--texts")
    write(folder / "texts.jsonl", ({"text": line} for line in texts(tmp_path, 80).read_text("utf-8").splitlines()))
    assert importer.one("acme", folder)[1]["texts"] == {"learned": 40, "judged": 40, "windows_found": ANY}


@pytest.mark.usefixtures("one_step")
def test_a_plan_refuses_what_an_import_does_with_the_same_words(store, tmp_path):
    importer = Importer(store, ImportOptions(), Matching(rank=2, least=0), texts(tmp_path, 60), DEVICE)
    names = {"acme": LABELS, "other": "abc"}
    folder, other = (tuned(tmp_path / name, id2label=dict(enumerate(own))) for name, own in names.items())
    of_labels = "config.json", {"id2label": dict(enumerate(LABELS))}
    adapter, tags = (changed(tmp_path, name, *of_labels) for name in ("peft-everywhere", "peft-tag-patterns"))
    importer.one("acme", folder)

    def check(tenant_id: str, folder: Path, *named: object, is_named: bool = True, given: object = importer.given, **options):
        own = replace(importer, options=ImportOptions(**options), given=given)
        (plan,) = own.plan([(tenant_id, folder)], is_named)
        with pytest.raises(InvalidInput, match=mentioning(*named)) as caught:
            own.one(tenant_id, folder, is_named)
        assert plan.refused == str(caught.value)

    assert not any(one.refused for one in importer.plan([("acme", folder)]))
    check("Acme", folder, "'Acme'")
    for own in (other, adapter):
        check("acme", own, "'acme'", own, folder, "--id", is_named=False)
    check("new", folder, "'bio'", domain="bio")
    check("new", folder, "--texts", given=None)
    check("acme", folder, "'acme'", "classify", "multilabel", task="multilabel")
    check("acme", other, "'acme'", "'red'", "'a'")
    check("acme", tags, "'acme'", "classify", "tag")
    test = write(tmp_path / "test.jsonl", [{"text": "a", "label": "black"}])
    for own in (folder, adapter):
        check("new", own, test, "'black'", test=test)
        check("new", own, tmp_path / "none", test=tmp_path / "none")


def test_what_may_help_depends_on_how_a_tenant_has_learned():
    """The totals of a folder: tests/cli/test_stores.py."""
    exams = [{"score": 0.5}, {"score": 0.8}, {"score": 0.7}]
    report = {"asked": {"most_texts": 3000, "rank": 4}, "change_held": 1.0, "exams": exams}
    assert mentions(advice(report), "--texts", "--most-texts above 3,000", "tables", "dedicated")
    assert not mentions(advice(report), "--rank")
    report |= {"change_held": 0.5, "exams": exams[:2]}
    assert mentions(advice(report), "--rank", 4, "50%", "--epochs")
    assert mentions(advice(report | {"root_explained": 0.838}), "root", "only 0.838 of the variance")
    assert "variance" not in advice(report | {"root_explained": 0.95}) + advice(report | {"root_explained": None})


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=mentioning("nowhere", "no folder")):
        named([tmp_path / "nowhere"])
