"""A tenant with a teacher learns from its soft answers, goes on after an interruption, and says how good the teacher was."""

import pytest
import torch

from builder.store import savepoint
from builder.tables.root import RootOptions, build_root
from builder.training import teacher
from hplm.errors import InvalidInput
from tests.builder.checkpoints import save_bert
from tests.builder.stores import CPU, NO_TIME, some_lines
from tests.builder.training.small_tenants import learn, write
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store with a root of a saved BERT, and labelled texts: whether a text has its first word again."""
    folder = tmp_path_factory.mktemp("original")
    lines = [line.replace("水", "") for line in some_lines(120, 1)]
    (folder / "corpus.txt").write_text("\n".join(lines), "utf-8")
    (folder / "bert").mkdir()
    model, options = str(save_bert(folder / "bert")), RootOptions(name="tiny")
    store, _ = build_root(model, [folder / "corpus.txt"], folder / "store", options, NO_TIME, CPU)
    rows = [{"text": " ".join(line.split()[:9]), "label": "ab"[line.split()[0] in line.split()[1:9]]} for line in lines]
    return store, write(folder / "train.jsonl", rows)


def test_a_tenant_learns_the_answers_of_a_teacher(original, monkeypatch):
    store, file = original
    plain = learn(store, "classify", file, tenant="plain", epochs=2)
    taught = learn(store, "classify", file, tenant="taught", epochs=2, teacher="dedicated")
    report = store.report(taught)
    assert 0 <= report["teacher"]["dev"] <= 1 and "teacher" not in store.report(plain)
    weights = [store.tenant_weights(tenant)[1]["weight"] for tenant in (plain, taught)]
    assert not torch.equal(*weights)
    assert learn(store, "classify", file, tenant="taught", epochs=2, teacher="dedicated") == taught  # nothing is learned anew
    monkeypatch.setattr(savepoint, "SECONDS_BETWEEN", 0.0)
    count, finetune = 0, teacher.finetune

    def cut(*given):
        nonlocal count
        count += 1
        if count == 2:  # the teacher has learned
            raise KeyboardInterrupt
        return finetune(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(teacher, "finetune", cut)
        learn(store, "classify", file, tenant="again", epochs=2, teacher="dedicated")
    again = learn(store, "classify", file, tenant="again", epochs=2, teacher="dedicated")
    assert torch.equal(store.tenant_weights(again)[1]["weight"], weights[1])


def test_a_teacher_of_another_kind_or_with_a_grid_is_refused(original):
    store, file = original
    for options in ({"teacher": "nobody"}, {"teacher": "dedicated", "grid": True}):
        with pytest.raises(InvalidInput, match=mentioning("--teacher", "dedicated", "--grid")):
            learn(store, "classify", file, **options)
