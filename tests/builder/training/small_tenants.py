"""Data that a toy backbone learns in seconds, and how tests let it learn them, or only store what a training starts with."""

import json
import random
from dataclasses import asdict
from functools import partial

import torch

from builder.learning.progress import Exam, Progress
from builder.tasks.scores import Scores
from builder.training.build import build_tenant
from builder.training.finetuning import Trained, tenant_model
from testing.toy import WORDS
from tests.support.device import DEVICE

PARTS = WORDS[:8]


def classified(rng):
    label = rng.choice(["left", "right"])
    words = rng.choices(WORDS[50:], k=rng.randint(2, 9))
    words.insert(rng.randrange(len(words) + 1), WORDS[0] if label == "left" else WORDS[1])
    return {"text": " ".join(words), "label": label}


def entities(rng):
    tokens, tags = [], []
    for _ in range(rng.randint(2, 6)):
        inside = rng.random() < 0.5
        for number in range(rng.randint(1, 3)):
            tokens.append(rng.choice((PARTS[4:] if number else PARTS[:4]) if inside else WORDS[20:]))
            tags.append(("I-P" if number else "B-P") if inside else "O")
    return {"tokens": tokens, "tags": tags}


def many(rng):
    present = [i for i in range(3) if rng.random() < 0.5]
    words = rng.choices(WORDS[50:], k=rng.randint(2, 6)) + [WORDS[i] for i in present]
    rng.shuffle(words)
    return {"text": " ".join(words), "labels": [f"has-{i}" for i in present]}


def valued(rng):
    words = [rng.choice(PARTS if rng.random() < 0.5 else WORDS[50:]) for _ in range(6)]
    return {"text": " ".join(words), "label": 40 + sum(word in PARTS for word in words)}


def asked(rng):
    passage = rng.choices(WORDS[50:], k=rng.randint(4, 12))
    answer = rng.choices(PARTS, k=rng.randint(1, 3))
    at = rng.randrange(len(passage))
    text = " ".join(passage[:at] + answer + passage[at:])
    start = len(" ".join(passage[:at])) + bool(at)
    answers = {"text": [" ".join(answer)], "answer_start": [start]}
    return {"text": rng.choice(WORDS[20:]), "text_pair": text, "answers": answers}


def perhaps_asked(rng):
    if rng.random() < 0.6:
        return asked(rng)
    passage = " ".join(rng.choices(WORDS[50:], k=rng.randint(5, 14)))
    return {"text": rng.choice(WORDS[20:]), "text_pair": passage, "answers": {"text": [], "answer_start": []}}


def near(rng):
    """Two texts with the same three words, and sometimes a third that shares other words with the first."""
    topic, noise = rng.sample(WORDS[:30], 3), [rng.choices(WORDS[50:60], k=2) for _ in range(3)]
    texts = [[*topic, *noise[0]], [*topic, *noise[1]], [*rng.sample(WORDS[:30], 3), *noise[0]]]
    for text in texts:
        rng.shuffle(text)
    named = zip(("text", "positive", "negative"), map(" ".join, texts), strict=True)
    return dict([*named][: 3 if rng.random() < 0.5 else 2])


CUT = {"adapter": "lora", "body_rate": 3e-3}  # the upper layers learn, and the adapter is cut from their change
TASKS = {  # task, texts, metric, the least score of a tenant that has learned from them, options
    "bio": ("tag", 300, "entity_f1", 0.5, {}),
    "multilabel": ("multilabel", 360, "micro_f1", 0.7, {}),  # with all labels everywhere 0.67
    "regress": ("regress", 180, "pearson", 0.55, {}),
    "span-or-none": ("span", 240, "f1", 0.45, {}),  # without any answer 0.4
    "cut": ("classify", 120, "accuracy", 0.7, CUT),
    "near": (
        "embed",
        240,
        "ndcg10",
        0.3,
        {"learning_rate": 1e-2, "embedding": {"shortens": True, "prefixes": {"query": "q "}}},
    ),
}
MAKERS = {  # of the examples of a task, or of an entry of TASKS
    "classify": classified, "tag": entities, "span": asked, "bio": entities, "multilabel": many, "regress": valued,
    "span-or-none": perhaps_asked, "cut": classified, "near": near,
}  # fmt: skip
STILL = 1e-12  # a learning rate that changes no stored weight


def write(path, examples):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def made(folder, name, count, seed):
    """Writes examples that a backbone learns without trouble."""
    rng = random.Random(f"{name} {seed}")
    return write(folder / f"{name}-{seed}.jsonl", [MAKERS[name](rng) for _ in range(count)])


def learn(store, task, train, dev=None, tenant="acme", **options):
    return build_tenant(store, tenant, "root", task, train, dev, **{"rank": 8, "device": DEVICE, **options})


def untrained(body, data, options, saved=None, further=None):
    """Is called like `finetune`, and learns nothing: it moves the biases of the start's head by the learning rate."""
    model, start = tenant_model(data.config, len(data.labels), options), data.start
    if start is not None:
        model.load(*start)
    with torch.no_grad():
        model.head["bias"].add_(options.learning_rate)
    model.to(data.device).round_to_storage()
    scores = Scores(len(data.dev.examples), "accuracy", {"accuracy": 0.5})
    now = Progress(1, 1, 0.0, [1.0])
    now.examined(Exam(0.5, 1.0), {}, 0.0)
    return Trained(
        body.to(data.device),
        model,
        scores,
        {**asdict(options), "kept_epoch": 1, "best_epoch": 1, "epochs_run": 1, **now.reported()},
    )


def unexpected(*_, **__):
    raise AssertionError("this command has nothing to train")


pretend = partial(learn, trainer=untrained)


def weights(store, tenant, version):
    adapter, head = store.tenant_weights(store.tenant_version(tenant, version))
    return {f"{i}/{name}": part.float() for i, layer in enumerate([*(adapter or ()), head]) for name, part in layer.items()}
