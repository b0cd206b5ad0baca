"""From a Hugging Face checkpoint to answers and their score, command by command, as the README says. Trains for seconds."""

import json
import random
import shutil

import pytest
from transformers import BertConfig, BertForMaskedLM

from hplm.cli.main import main
from testing.random_store import words
from tests.builder.checkpoints import save_tokenizer
from tests.builder.training.small_tenants import unexpected
from tests.cli.commands import printed, refused, run
from tests.support.learning import by_one_step
from tests.support.lent import loading
from tests.support.message import mentions

pytestmark = [pytest.mark.slow, pytest.mark.server("bare")]

WORDS = words(200)
FRUIT, METAL, OTHER = WORDS[:30], WORDS[30:60], WORDS[60:]


def _text(rng, kind):
    return rng.choices(OTHER, k=6) + rng.choices(FRUIT if kind == "fruit" else METAL, k=3)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A BERT saved by Hugging Face, two corpora, and labelled data that can be learned."""
    folder, rng = tmp_path_factory.mktemp("material"), random.Random(0)
    config = BertConfig(
        vocab_size=200, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder / "bert")
    save_tokenizer(folder / "bert", 200)
    examples = [(kind, rng.sample(text, len(text))) for kind in ("fruit", "metal") * 150 for text in [_text(rng, kind)]]
    (folder / "corpus.txt").write_text("\n".join(" ".join(text) for _, text in examples) + "\n")
    classify = [json.dumps({"text": " ".join(text), "label": kind}) for kind, text in examples]
    tag = [json.dumps({"tokens": text, "tags": ["FRUIT" if word in FRUIT else "O" for word in text]}) for _, text in examples]
    later = [json.dumps({"text": " ".join(_text(rng, kind)), "label": kind}) for kind in ("fruit", "metal") * 60]
    (folder / "classify.held.jsonl").write_text("\n".join([*classify[:50], *classify[-10:], *later]) + "\n")
    for name, lines in (("classify", classify), ("tag", tag)):
        (folder / f"{name}.train.jsonl").write_text("\n".join(lines[:240]) + "\n")
        (folder / f"{name}.dev.jsonl").write_text("\n".join(lines[240:]) + "\n")
    return folder


@pytest.fixture(scope="module")
def folder(material, tmp_path_factory):
    """Where the commands of the README have built a store and exported it."""
    folder = tmp_path_factory.mktemp("built")
    store, corpus = ["--store", folder / "store"], ["--corpus", material / "corpus.txt"]
    tenants = [
        ["build", "tenant", "--id", task, "--domain", "goods", "--task", task, "--rank", 4, *store, "--epochs", epochs,
         "--train", material / f"{task}.train.jsonl", "--dev", material / f"{task}.dev.jsonl"]
        for task, epochs in (("classify", 2), ("tag", 2))
    ]  # fmt: skip
    for command in (
        ["build", "root", "--model", material / "bert", "--name", "tiny", *corpus, *store, "--minutes", 0.002],
        ["build", "domain", "--name", "goods", *corpus, *store, "--minutes", 0.002, "--min-tokens", 100],
        *tenants,
        ["calibrate", *store, "--id", "classify", "--texts", material / "classify.held.jsonl"],
        # In 32 bits, as `evaluate` computes, so that no text near the decision boundary gets another label elsewhere.
        ["export", *store, "--repository", folder / "repository", "--dtype", "fp32"],
    ):
        assert main([*map(str, command)]) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder, servers):
    with loading(servers.get("bare"), folder / "repository") as server:
        yield server


def test_a_served_checkpoint_answers(folder, server, capsys):
    listed = run(capsys, "tenant", "list", "--repository", folder / "repository")["tenants"]
    assert [(tenant["id"], tenant["backbone"], tenant["domain"], tenant["task"]) for tenant in listed] == [
        ("classify", "tiny", "goods", "classify"),
        ("tag", "tiny", "goods", "tag"),
    ]
    text = f"{FRUIT[0]} {OTHER[0]} {FRUIT[1]} {FRUIT[2]}"
    for tenant, labels, version in (("classify", {"fruit", "metal"}, "2"), ("tag", {"FRUIT", "O"}, "1")):  # 2: calibrated
        answer = run(capsys, "infer", text, "--tenant", tenant, "--url", server.http_url)
        assert answer["label"] in labels and 0 <= answer["score"] <= 1 and answer["version"] == version
        assert len(answer["rows"]) == (1 if tenant == "classify" else 4)
        assert answer["confidence"] is None if tenant == "tag" else 0 < answer["confidence"] <= 1
    assert "[no_tenant]" in refused(capsys, "infer", text, "--tenant", "nobody", "--url", server.http_url)


def evaluate(folder, material, tenant):
    return ["evaluate", "--store", folder / "store", "--id", tenant, "--test", material / f"{tenant}.dev.jsonl"]


def test_baselines_learn_from_the_same_data_once(folder, material, capsys, tmp_path, monkeypatch):
    command = evaluate(folder, material, "classify")
    found = run(capsys, *command, "--against", "plot", "--picture", tmp_path / "confusion.png")
    assert found["metric"] == "accuracy" and found["served"] is None and found["dedicated"] is None
    assert all(0 <= found[name] <= 1 for name in ("hplm", "plot"))
    assert found["scores"]["plot"]["accuracy"] == found["plot"] and found["scores"]["hplm"]["rows"] == 60
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert found["scores"]["plot"]["difference"] == pytest.approx(found["plot"] - found["hplm"], abs=2e-4)
    with monkeypatch.context() as patch:
        patch.setattr("research.schemes.trained.train_scheme", unexpected)
        assert run(capsys, *command, "--against", "plot") == found
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": "w", "label": label}) + "\n" for label in ("up", "down") * 20))
    for data in (other, "gone.jsonl"):
        said = refused(capsys, *command, "--against", "shared", "--train", data)
        assert mentions(said, data, "'classify'", "--train")


def test_served_answers_and_those_in_eight_bits_have_nearly_the_same_score(folder, server, material, capsys):
    """Every task: tests/answers/test_ways.py."""
    command = evaluate(folder, material, "tag")
    found = run(capsys, *command, "--url", server.http_url, "--int8")
    assert found["served"] == pytest.approx(found["hplm"], abs=1e-3) and found["int8"] == pytest.approx(found["hplm"], abs=0.05)
    lines = printed(capsys, *command, "--url", f"grpc://{server.grpc_url}").splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["hplm", "served"]
    assert [float(line.split()[1]) for line in lines[-2:]] == [found["hplm"], found["served"]]
    assert mentions(refused(capsys, *command, "--url", "127.0.0.1:1"), "127.0.0.1:1")


def test_a_tenant_is_calibrated_and_one_that_is_behind_is_named(folder, server, material, capsys, tmp_path):
    store, held = shutil.copytree(folder / "store", tmp_path / "store"), material / "classify.held.jsonl"
    calibrated = run(capsys, "calibrate", "--store", store, "--id", "classify", "--texts", held)
    assert (calibrated["texts"], calibrated["left_out"]) == (120, 60)
    again = ["build", "tenant", "--id", "tag", "--domain", "goods", "--task", "tag", "--epochs", "1"]
    with by_one_step():
        built = run(capsys, *again, "--train", material / "tag.train.jsonl", "--store", store)
    assert built["version"] == 2
    said = refused(capsys, *evaluate(tmp_path, material, "tag"), "--url", server.http_url)
    assert mentions(said, "'tag'", 1, 2, "hplm tenant update")
