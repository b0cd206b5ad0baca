"""`hplm bench training`: a training step that reads the tables, beside steps that compute the lower layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import BertModel

from bench.rows import Positive, Row, Rows, Size, Whole, benchmark, expect_text
from bench.turns import alternate
from builder.hardware import half_precision
from builder.store.store import Store
from builder.tasks.examples import Example, Labelled
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.bodies import Body, PlotBody, WholeBody
from builder.training.finetuning import TrainingOptions, tenant_model
from hplm.model.checkpoint import Checkpoint
from hplm.model.config import BackboneConfig
from testing.random_store import SIZES, bert_config, random_store, tokenizer_json, words

CPU = torch.device("cpu")
TEXTS = 256  # looked up before the measurement starts; each step takes some of them


@benchmark(size="toy", tokens=12, texts=4, seconds=0.05)
def training(*, size: Size = "minilm", tokens: Whole = 64, texts: Whole = 8, seconds: Positive = 10.0) -> Rows:
    """Measures a step of adapter training that reads the tables, beside steps that compute the lower layers (`whole`).

    Lower layers are those of the original BERT. Weights are random.

    :param size: of the model
    :param tokens: of a text
    :param texts: of a step
    :param seconds: for each figure
    """
    expect_text(tokens, size)
    config = SIZES[size]
    with TemporaryDirectory() as folder:
        store = random_store(Path(folder) / "store", config, ())
        reader, task = Reader(store, "root", 1), training_task("classify")
        known = reader.read(_labelled(config, tokens), task, ["no", "yes"], show_progress=False)
        in_half = half_precision(CPU)
        bodies = {"tables": PlotBody(store.upper(), config.heads), "whole": WholeBody(random_checkpoint(store))}

        def step_of(body: Body) -> Callable[[int], None]:
            body.eval().requires_grad_(False)
            model = tenant_model(config, 2, TrainingOptions())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

            def step(number: int) -> None:
                chosen = np.arange(number * texts, (number + 1) * texts) % TEXTS
                pack = reader.pack(known, chosen, CPU, body.reads_tables)
                with in_half:
                    logits = model(body, pack)
                loss, learned = task.loss(logits, pack.targets, pack.rows_of, model.spread)
                optimizer.zero_grad()
                (loss / learned).backward()
                optimizer.step()

            return step

        timings = alternate({name: step_of(body) for name, body in bodies.items()}, seconds, warm_up=2)
    for name, took in timings.items():
        yield Row(f"{name}_ms", took / 1e3, "ms")
    yield Row("share_of_whole", timings["tables"] / timings["whole"])
    yield Row("tokens", tokens * texts)
    yield Row("threads", torch.get_num_threads())


def _labelled(config: BackboneConfig, tokens: int) -> Labelled:
    rng, known = random.Random(0), words(config.vocabulary)
    texts = [" ".join(rng.choices(known, k=tokens - 2)) for _ in range(TEXTS)]
    examples = [Example(number, text, labels=(rng.choice(("no", "yes")),)) for number, text in enumerate(texts)]
    return Labelled(Path("random words"), examples)


def random_checkpoint(store: Store) -> Checkpoint:
    config, original = store.config, bert_config(store.config)
    weights = dict(BertModel(original, add_pooling_layer=False).state_dict())
    return Checkpoint(config, original.num_hidden_layers, weights, tokenizer_json(config.vocabulary))
