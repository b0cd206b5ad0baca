"""Tenants of a decoder learn to write targets behind prompts, and what is served writes the same."""

import json

import pytest
import torch

from builder.evaluation.writing import write_here
from builder.importing.adapter_import import plain_tenant
from builder.publish.export import write_version
from builder.store.store import Store
from builder.tasks.tasks import training_task
from builder.training.build import build_tenant
from builder.training.generating import PromptReader
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from tests.builder.stores import decoder_store
from tests.cli.commands import printed, refused, run
from tests.model.decoders import START, drawn, llama, saved
from tests.support.device import DEVICE
from tests.support.generative import GenerativeReference
from tests.support.message import mentioning

ANSWERS = {"red": "x", "green": "go", "blue": "y"}
LINES = [{"text": f"{colour} {number}: ", "target": answer} for number in range(12) for colour, answer in ANSWERS.items()]


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(drawn(llama()), tmp_path_factory.mktemp("decoder") / "tiny", starts=True)


@pytest.fixture
def train(tmp_path):
    return written(tmp_path / "train.jsonl", LINES)


def said(store: Store, tenant, folder, prompt):
    """Returns what the reference writes, which reads an export of the store."""
    write_version(store, store.tenants(), folder)
    reader = PromptReader(store, "root", 1)
    tokens = GenerativeReference(Backbone(folder)).generate(reader.prompts.encode(prompt).tolist(), tenant, 12).tokens
    return reader.prompts.decode(tokens)


@pytest.mark.parametrize(
    "lower, options",
    [
        (0, {"rank": 8}),
        (2, {"adapter": "lora", "places": ("query", "value", "ffn_out"), "rank": 8}),
        (0, {"adapter": "lora", "body_rate": 5e-3, "rank": 16}),
    ],
)
def test_a_tenant_writes_what_it_has_learned(folder, train, tmp_path, lower, options):
    (corpus := tmp_path / "corpus.txt").write_text("".join(f"{line['text']}{line['target']}\n" for line in LINES), "utf-8")
    store = decoder_store(folder, tmp_path / "store", lower, [corpus] if lower else [])
    given = {"device": DEVICE, "learning_rate": 2e-2, "epochs": 25, "patience": 25, **options}
    tenant = build_tenant(store, "lights", None, None, train, **given)
    report = store.report(tenant)
    assert (tenant.task, tenant.labels, report["dev"]["metric"]) == ("generate", [], "right_tokens")
    assert report["dev"]["right_tokens"] > 0.9 and report["dev"]["rows"] > 0
    assert (store.tenant_folder("lights", 1) / "report.html").exists()
    for colour, answer in ANSWERS.items():
        assert said(store, "lights", tmp_path / colour, f"{colour} 3: ") == answer
    examples = training_task("generate").read(train)
    answers = write_here(store, tenant, examples, 4, DEVICE)
    assert answers == [[line["target"]] for line in LINES] and not list(store.folder.glob("building/writing-*"))
    scores = training_task("generate").score([], examples, [*answers[:-4], [""], [""], *answers[-2:]])
    assert (scores.metric, scores.main) == ("rougeL", pytest.approx(17 / 18))
    assert build_tenant(store, "lights", None, None, train, **given) == tenant, options  # the same call changes nothing


def test_only_targets_are_learned_and_long_prompts_lose_their_beginning(folder, tmp_path):
    store = decoder_store(folder, tmp_path / "store")
    reader = PromptReader(store, "root", 1)
    lines = [{"text": "x" * 300, "target": "end"}, {"text": "", "target": "y" * 200}, {"text": "a", "target": "b"}]
    task = training_task("generate")
    texts = reader.read(task.read(written(tmp_path / "long.jsonl", lines)), task, [])
    first, second, short = texts.texts
    positions = store.config.positions
    assert texts.cut == 2 and len(first.tokens) == len(second.tokens) == positions
    assert first.tokens[0] == START and reader.prompts.decode(first.targets) == "end"
    assert short.tokens.tolist() == [*reader.prompts.encode("ab"), *store.config.end_ids[:1]]
    assert short.targets.tolist() == short.tokens[2:].tolist() and short.spans[:, 0].tolist() == [1, 2]


def test_a_chat_is_learned_as_it_is_asked(folder, tmp_path, monkeypatch):
    store = decoder_store(folder, tmp_path / "store")
    task, reader = training_task("generate"), PromptReader(store, "root", 1)
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    (example,) = task.read(written(tmp_path / "chats.jsonl", [{"messages": chat}]))
    assert example.is_chat and json.loads(example.text) == chat[:1] and example.target == "Me."
    with pytest.raises(InvalidInput, match=mentioning("chats.jsonl:1", "chat template")):  # this decoder has none
        reader.read([example], task, [])
    monkeypatch.setattr(type(reader.prompts), "of_messages", lambda self, given: self.encode(f"<{given}>"))
    (text,) = reader.read([example], task, []).texts
    assert reader.prompts.decode(text.targets) == "Me."


@pytest.mark.parametrize(
    "line, named",
    [
        ({"text": "a"}, "'target' is empty"),
        ({"text": "a", "target": " "}, "'target' is empty"),
        ({"text": "a", "target": "b", "messages": []}, "one or the other"),
        ({"messages": [{"role": "user", "content": "a"}]}, "its answer"),
        ({"text": "a", "label": "b"}, "'target' is empty"),
    ],
)
def test_a_wrong_line_is_named(folder, tmp_path, line, named):
    store = decoder_store(folder, tmp_path / "store")
    with pytest.raises(InvalidInput, match=mentioning("wrong.jsonl:1", named)):
        build_tenant(store, "lights", None, None, written(tmp_path / "wrong.jsonl", [line]), device=DEVICE)


def test_the_command_trains_a_decoders_tenant_and_refuses_what_it_ignores(folder, train, tmp_path, capsys):
    store = decoder_store(folder, tmp_path / "store")
    asked = ["build", "tenant", "--store", store.folder, "--id", "lights"]
    for more in (["--teacher", tmp_path], ["--rank", 0]):
        refused(capsys, *asked, "--train", train, *more)
    refused(capsys, *asked, "--train", train, "--task", "classify")
    refused(capsys, *asked, "--rank", 4)  # without --train nothing learns
    built = run(capsys, *asked, "--train", train, "--epochs", 1)
    assert (built["task"], built["version"], built["labels"]) == ("generate", 1, [])
    again = run(capsys, *asked, "--train", written(tmp_path / "more.jsonl", LINES[:30]), "--epochs", 1)
    assert (again["version"], again["from_version"]) == (2, 1)
    found = run(capsys, "evaluate", "--store", store.folder, "--id", "lights", "--test", train)
    assert 0 <= found["scores"]["hplm"]["rougeL"] <= 1 and found["scores"]["hplm"]["rows"] == len(LINES)
    assert found["share"] == pytest.approx(found["perplexity"] / found["original"], rel=1e-3) and found["share"] < 1
    refused(capsys, "evaluate", "--store", store.folder, "--id", "lights", "--test", train, "--int8")
    printed(capsys, "verify", "--store", store.folder)


def test_rivals_learn_the_same_and_the_untouched_model_writes_as_a_plain_tenant(folder, train, tmp_path, capsys):
    store = decoder_store(folder, tmp_path / "store")
    options = ["--rank", 4, "--epochs", 1, "--adapter", "lora"]
    run(capsys, "build", "tenant", "--store", store.folder, "--id", "lights", "--train", train, *options)
    asked = ["evaluate", "--store", store.folder, "--id", "lights", "--test", train, "--against"]
    found = run(capsys, *asked, "dedicated,adapter,shared,compressed", "--seeds", 2)
    assert found["scores"].keys() == {"hplm", "dedicated", "adapter", "shared", "compressed"}
    assert all(one["rows"] == len(LINES) for one in found["scores"].values())
    tenant = plain_tenant(store, "base")
    examples = training_task("generate").read(train)
    (own,) = (store.folder / "tenants/lights/baselines").glob("*/shared-0.json")
    assert json.loads(own.read_bytes())["answers"] == write_here(store, tenant, examples, 3, DEVICE)
    refused(capsys, *asked, "distil")


@torch.no_grad()
def test_a_plain_tenant_stays_plain(folder, tmp_path, capsys):
    store = decoder_store(folder, tmp_path / "store")
    asked = ["build", "tenant", "--store", store.folder, "--id", "base"]
    assert run(capsys, *asked) == {"tenant": "base", "version": 1, "task": "generate"}
