"""A tenant that is exported as a plain checkpoint answers in `transformers` as it does here, above the tables."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from builder.importing.adapter_import import ImportOptions, import_tenant
from builder.importing.checkpoint import Family
from builder.importing.matching import TunedModel
from builder.importing.plain import save_checkpoint
from builder.store.store import Store, TenantVersion
from builder.tasks.examples import Example
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.model import TenantModel
from hplm.adapters.layout import head_layout
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from testing.random_store import random_students, random_tenant
from tests.builder.importing.stores import FIXTURES, LABELS, texts
from tests.builder.stores import build
from tests.builder.training.small_tenants import write
from tests.cli.commands import printed, refused
from tests.support.device import DEVICE
from tests.support.families import FAMILIES, SENTENCES, save_family
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

PROBLEMS = {"classify": "single_label_classification", "multilabel": "multi_label_classification", "regress": "regression"}
WITHOUT_QUESTIONS = "eurobert", "nomic_bert"  # families of which transformers has no model for question answering
KINDS = {"classify": "SequenceClassification", "tag": "TokenClassification", "span": "QuestionAnswering"}


@pytest.fixture(scope="module", params=[*FAMILIES])
def store(request, tmp_path_factory):
    """A store of each family, with a tenant of each task."""
    folder = tmp_path_factory.mktemp(request.param)
    save_family(folder / "base", request.param)
    base = load_checkpoint(str(folder / "base"), "tiny", 1)
    store = Store.create(folder / "store", str(folder / "base"), base.config, base.tokenizer_json, *split(base))
    build(store, folder, "root", ["the cat sat on the mat", "a dog ran to the cat"] * 5)
    functions = {"distilbert": "relu", "electra": "gelu", "eurobert": "gelu", "modernbert": "gelu_norm"}
    function = functions.get(request.param, "tanh")
    flat = function if request.param == "modernbert" else None  # of heads that elsewhere have one layer
    for tenant_id, task, labels, head in (
        ("classify", "classify", LABELS, function),
        ("multilabel", "multilabel", LABELS, flat),  # a head of one layer, which has to fit behind the first one of its class
        ("tag", "tag", LABELS, flat),
        ("span", "span", ["start", "end"], flat),
        ("regress", "regress", ["value"], function),
        ("no-answer", "span", ["start", "end", "none"], flat),
    ):
        form = TenantVersion(tenant_id, 1, "root", 1, task, labels, 4, "lora", ("query", "value", "ffn_out"), "relu", head)
        random_tenant(store, form, 0.3, seed=1)
    return store


@pytest.mark.parametrize("task", ["classify", "multilabel", "tag", "span", "regress"])
def test_an_exported_tenant_answers_as_here_from_the_same_states(store, tmp_path, task):
    """The states that enter the upper layers come from the tables, so that both see windows."""
    if task == "span" and Path(store.model).parent.name.startswith(WITHOUT_QUESTIONS):
        with pytest.raises(InvalidInput, match=mentioning("ModelForQuestionAnswering")):
            save_checkpoint(store, task, tmp_path / "plain", None, DEVICE)
        return
    save_checkpoint(store, task, tmp_path / "plain", None, DEVICE)
    loader = getattr(transformers, f"AutoModelFor{KINDS.get(task, 'SequenceClassification')}")
    plain = loader.from_pretrained(tmp_path / "plain").to(DEVICE).eval()
    tenant, config = store.tenant(task), store.config
    reader, pair = Reader(store, "root", 1), "a dog ran" if task == "span" else None
    text = Example(tmp_path / "texts", 1, "the cat sat on the mat", pair)
    read = reader.read([text], training_task(task).unlabelled(), tenant.labels)
    own, pack = TunedModel.of_tenant(store, tenant, DEVICE), reader.pack(read, [0], DEVICE)
    base = plain.base_model
    layers = getattr(base, "layers", None) or getattr(base, "transformer", None) or base.encoder
    layers = getattr(layers, "layer", layers)
    with torch.no_grad():
        entering, *_ = own.body.below(pack)
        layers[config.lower_layers].register_forward_pre_hook(lambda _, given: (entering[None], *given[1:]))
        states, wanted = own.through(pack)
        said = plain(torch.full((1, len(entering)), 5, device=DEVICE), output_hidden_states=True)  # the tokens do not matter
    assert torch.allclose(said.hidden_states[-1][0], states[-1], atol=1e-3)
    found = torch.stack([said.start_logits, said.end_logits], dim=2) if task == "span" else said.logits
    of_text = task in PROBLEMS
    assert torch.allclose(found if of_text else found[0, pack.reading], wanted, atol=1e-3)
    problem = getattr(plain.config, "problem_type", None)
    assert (plain.config.num_labels, problem) == (len(tenant.labels), PROBLEMS.get(task))
    again = Family(store.model, config).read(tmp_path / "plain").head  # as an import reads it
    head = TenantModel.of(None, (head_layout(config, len(tenant.labels), again.function), again.weights))
    assert again.task == task
    assert torch.allclose(head.to(DEVICE).read(states[-1])[slice(1) if of_text else pack.reading], wanted, atol=1e-3)


def test_the_score_of_no_answer_is_lost_and_the_report_says_so(store, tmp_path):
    if Path(store.model).parent.name.startswith(WITHOUT_QUESTIONS):
        pytest.skip("transformers has no such model of this family")
    pairs = write(tmp_path / "pairs.jsonl", ({"text": "the dog", "text_pair": line} for line in SENTENCES))
    report = save_checkpoint(store, "no-answer", tmp_path / "plain", pairs, DEVICE)
    assert "no answer" in report["lost"] and report["answers"] == len(SENTENCES)


def test_the_command_says_what_it_saved_and_what_it_cannot(imported, tmp_path, capsys):
    store = Store(shutil.copytree(imported, tmp_path / "store"))
    import_tenant(store, "luna", FIXTURES / "peft-everywhere", ImportOptions(labels=LABELS), DEVICE)
    random_tenant(store, TenantVersion("hub", 1, "root", 1, "classify", LABELS, 4), 0.3, seed=1)
    command = ["tenant", "export", "--store", store.folder, "--to", tmp_path / "out"]
    lines = printed(capsys, *command, "luna", "--texts", texts(tmp_path, 60)).splitlines()
    assert mentions(lines[0], "luna", 1) and mentions(lines[1], "%", "60")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "red", "1": "green", "2": "blue"}
    assert mentions(refused(capsys, *command, "luna"), tmp_path / "out", "exists")
    command[-1] = tmp_path / "other"
    assert mentions(refused(capsys, *command, "hub"), "bottleneck", "LoRA")
    assert mentions(refused(capsys, *command, "nobody"), "nobody", "luna")
    random_students(store, store.tenant("luna"))
    assert mentions(printed(capsys, *command, "luna"), "lost", "students", "full stack")
