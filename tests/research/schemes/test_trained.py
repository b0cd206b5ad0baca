"""The schemes beside hPLMs: the whole BERT equals the original, each tunes only its own part, and students have teachers."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.evaluation.tenant import evaluate_tenant
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.data import Data
from builder.training.finetuning import TrainingOptions
from builder.training.tenant import build_tenant
from hplm.errors import InvalidInput
from research.schemes.pretrained import evenly
from research.schemes.trained import SCHEMES, body_of, score_schemes, train_scheme, whole_body
from tests.builder.training.small_tenants import classified, paired, write
from tests.research.schemes.checkpoints import bert_and_store
from tests.support.device import DEVICE
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

CLASSIFY = training_task("classify")
OWN = TrainingOptions(epochs=1, rank=4)


@pytest.fixture(scope="module")
def bert_and_own_store(tmp_path_factory):
    return bert_and_store(tmp_path_factory.mktemp("schemes"))


@pytest.fixture(scope="module")
def store(bert_and_own_store):
    return bert_and_own_store[1]


def read_of(store, path, maker, count, labels):
    """Returns data of so many examples, which it writes to the path."""
    rng, reader = random.Random(0), Reader(store, "root", 1)
    labelled = CLASSIFY.read(write(path, [maker(rng) for _ in range(count)]))
    texts = reader.read(labelled, CLASSIFY, labels, show_progress=False)
    return Data(reader, CLASSIFY, labels, texts, texts, DEVICE)


@pytest.fixture(scope="module")
def data(store, tmp_path_factory):
    return read_of(store, tmp_path_factory.mktemp("data") / "data.jsonl", classified, 40, ["left", "right"])


def test_whole_bodies_equal_the_original_and_students_start_from_its_layers(bert_and_own_store, tmp_path):
    stock, store = bert_and_own_store
    data = read_of(store, tmp_path / "pairs.jsonl", paired, 4, ["no", "yes"])
    pack = data.reader.pack(data.train, np.argsort(data.train.lengths), DEVICE, with_sums=False)
    pack, teacher = replace(pack, reading=torch.arange(len(pack.tokens))), whole_body(store).eval()
    with torch.no_grad():
        texts = zip(pack.tokens.split(pack.lengths), pack.segments.split(pack.lengths), strict=True)
        theirs = [stock(own[None], token_type_ids=kinds[None], output_hidden_states=True).hidden_states for own, kinds in texts]
        states = teacher.with_layers(range(4)).states(pack, None)
        for layers, expected in enumerate(map(torch.hstack, zip(*theirs, strict=True))):
            student = teacher.with_layers(range(layers))
            for ours in (student(pack, None), states[layers]):
                assert torch.allclose(ours, expected[0], atol=1e-4)
        assert torch.allclose(teacher(pack, None), expected[0], atol=1e-4)
    assert (evenly(6, 3), evenly(6, 2), evenly(12, 4)) == ([0, 2, 4], [1, 4], [1, 4, 7, 10])
    student.layers[0].qkv.weight.data.zero_()
    assert teacher.layers[0].qkv.weight.any()  # a student changes copies


WHOLE = {"embeddings", 0, 1, 2, 3}
TUNED = {  # the layers that change, and how many have an adapter
    "dedicated": (WHOLE, 0), "dedicated-lower": ({"embeddings", 0, 1}, 0), "dedicated-upper": ({2, 3}, 0),
    "shared": (set(), 0), "adapter": (set(), 2), "plot": ({0, 1}, 0), "hplm": (set(), 2),
    "distil": ({"embeddings", 0, 1}, 0), "tiny-third": ({"embeddings", 0}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TUNED)
def test_each_scheme_tunes_only_its_own_part(store, data, name):
    """Of a student, it is all of its fewer layers. The adapter of what upper layers learn is cut from their change."""
    own = replace(OWN, adapter="lora", body_rate=1e-3) if name in ("adapter", "hplm") else OWN
    trained = train_scheme(store, data, name, own, show_progress=False)
    if name in SCHEMES and SCHEMES[name].kept < 1:
        before = whole_body(store).with_layers(evenly(4, len(trained.body.layers))).state_dict()
    else:
        before = body_of(store, name).state_dict()
    changed = {key for key, tensor in trained.body.state_dict().items() if not torch.equal(tensor, before[key])}
    found = {int(key.split("layers.")[1].split(".")[0]) if "layers." in key else "embeddings" for key in changed}
    assert (found, len(trained.model.adapters)) == TUNED[name], name
    if trained.model.adapters:
        assert all(float(slot["ffn_in/b"].detach().abs().max()) > 0 for slot in trained.model.adapters)
        assert 0.3 < trained.report["change_held"] < 1


def test_schemes_learn_from_the_tenants_own_data_and_no_other(store, tmp_path):
    rng = random.Random(3)
    train, other, test = (
        write(tmp_path / f"{part}.jsonl", [classified(rng) for _ in range(40)]) for part in ("train", "other", "test")
    )
    build_tenant(store, "own", "root", "classify", train, rank=0, epochs=1, device=DEVICE, show_progress=False)
    evaluation = evaluate_tenant(store, "own", test, DEVICE, show_progress=False)

    def compared(*files):
        return score_schemes(store, evaluation, ["shared"], DEVICE, *files, show_progress=False)["shared"].rows

    moved = train.rename(tmp_path / "moved.jsonl")
    assert compared(moved) == 40
    for files, named in (((), (train, "--train")), ((other,), (other, "--train")), ((moved, other), (other, "--dev"))):
        with pytest.raises(InvalidInput, match=mentioning(*named, "'own'")):
            compared(*files)
