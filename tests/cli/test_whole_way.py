"""From a Hugging Face checkpoint to an answer, command by command, as the README says."""

import json
import random
import subprocess
import sys

import pytest
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from hplm.cli.main import main
from testing.random_store import tokenizer_json, words
from tests.support.message import mentions
from tests.support.servers import serving

pytestmark = pytest.mark.slow

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
    (folder / "tokenizer.json").write_text(tokenizer_json(200))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special).save_pretrained(folder / "bert")
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


def _run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_from_a_checkpoint_to_an_answer(material, tmp_path, capsys):
    store, repository = tmp_path / "store", tmp_path / "repository"
    corpus = material / "corpus.txt"
    root = _run(
        capsys, "build", "root", "--model", material / "bert", "--name", "tiny", "--corpus", corpus, "--store", store,
        "--minutes", 0.05,
    )  # fmt: skip
    assert root["domain"] == "root" and root["ngrams"] > 200
    assert main(["build", "root", "--model", "x", "--corpus", "y", "--store", str(store)]) == 1
    assert mentions(capsys.readouterr().err, store, "--store")
    domain = _run(
        capsys, "build", "domain", "--store", store, "--name", "goods", "--corpus", corpus, "--minutes", 0.02,
        "--min-tokens", 100,
    )  # fmt: skip
    assert domain["version"] == 1
    for task in ("classify", "tag"):
        built = _run(
            capsys, "build", "tenant", "--store", store, "--id", f"{task}-goods", "--domain", "goods", "--task", task,
            "--train", material / f"{task}.train.jsonl", "--dev", material / f"{task}.dev.jsonl", "--rank", 4,
        )  # fmt: skip
        assert built["dev"]["texts"] == 60
    held = material / "classify.held.jsonl"
    calibrated = _run(capsys, "calibrate", "--store", store, "--id", "classify-goods", "--texts", held)
    assert (calibrated["texts"], calibrated["left_out"], calibrated["changed"]) == (120, 60, True)
    assert _run(capsys, "export", "--store", store, "--repository", repository)["tenants"] == 2
    listed = _run(capsys, "tenant", "list", "--repository", repository)["tenants"]
    assert [(t["id"], t["backbone"], t["domain"], t["task"]) for t in listed] == [
        ("classify-goods", "tiny", "goods", "classify"),
        ("tag-goods", "tiny", "goods", "tag"),
    ]
    text = f"{FRUIT[0]} {OTHER[0]} {FRUIT[1]} {FRUIT[2]}"
    with serving(repository) as server:
        command = [sys.executable, "-m", "hplm.cli.main", "infer", "--url", server.http_url, "--json"]
        for tenant, labels in (("classify-goods", {"fruit", "metal"}), ("tag-goods", {"FRUIT", "O"})):
            done = subprocess.run([*command, "--tenant", tenant, text], capture_output=True, text=True, timeout=60)
            answer = json.loads(done.stdout)
            assert answer["label"] in labels and 0 <= answer["score"] <= 1 and answer["version"] == "1", done.stderr
            assert len(answer["rows"]) == (1 if tenant.startswith("classify") else 4)
            assert answer["confidence"] is None if tenant.startswith("tag") else 0 < answer["confidence"] <= 1
        refused = subprocess.run([*command, "--tenant", "nobody", text], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1 and "[no_tenant]" in refused.stderr and not refused.stdout
