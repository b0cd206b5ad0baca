"""Times a training step that reads the tables, beside steps that compute the lower layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from bench.tools.timing import Timing, alternate, cpu_ticks
from bench.training import TrainingBench
from builder.adaptation.lessons import Windows
from builder.hardware import half_precision
from builder.store.store import Store
from builder.training.bodies import Body, PlotBody, WholeBody
from builder.training.examples import Pack, Reader
from builder.training.finetuning import TrainingOptions, tenant_model
from builder.training.labelled import Example, Labelled
from builder.training.tasks import training_task
from hplm.model.checkpoint import Checkpoint
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack
from testing.random_store import SIZES, random_store, tokenizer_json, words

CPU = torch.device("cpu")
TEXTS = 256  # looked up before the measurement starts; each step takes some of them


class WindowBody(nn.Module):
    """Computes the lower stack on the windows that a table would hold, and then the shared upper stack."""

    reads_tables = False

    def __init__(self, lower: LowerStack, upper: PlotBody, config: BackboneConfig) -> None:
        super().__init__()
        self.lower, self.upper = lower, upper
        self._windows = Windows(config)

    def forward(self, pack: Pack, adapters: list | None) -> Tensor:
        with torch.no_grad():
            distinct, window_of = self._windows.whole(pack.tokens.numpy(), np.array(pack.lengths))
            sums = self.lower.window.aggregate(self.lower(distinct).index_select(0, window_of))
        return self.upper.from_sums(sums, pack, adapters)


def bench_training(case: TrainingBench) -> dict[str, Any]:
    config = SIZES[case.size]
    with TemporaryDirectory() as folder:
        store = random_store(Path(folder) / "store", config, ())
        reader, task = Reader(store, "root", 1), training_task("classify")
        texts = reader.read(_labelled(config, case.tokens), task, ["no", "yes"], show_progress=False)
        in_half = half_precision(CPU)
        bodies: dict[str, Body | WindowBody] = {
            "tables": PlotBody(store.upper(), config.heads),
            "upper": PlotBody(store.upper(), config.heads),
            "whole": WholeBody(random_checkpoint(store)),
            "windows": WindowBody(store.lower("root", 1), PlotBody(store.upper(), config.heads), config),
        }

        def step_of(name: str, body: Body | WindowBody) -> Callable[[int], None]:
            body.eval().requires_grad_(name == "upper")
            model = tenant_model(config, 2, TrainingOptions(rank=0) if name == "upper" else TrainingOptions())
            tuned = [parameter for part in (model, body) for parameter in part.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(tuned, lr=1e-3, fused=True)

            def step(number: int) -> None:
                chosen = np.arange(number * case.texts, (number + 1) * case.texts) % TEXTS
                pack = reader.pack(texts, chosen, CPU, body.reads_tables)
                with in_half:
                    logits = model(body, pack)
                loss, learned = task.loss(logits, pack.targets, pack.rows_of, model.spread)
                optimizer.zero_grad()
                (loss / learned).backward()
                optimizer.step()

            return step

        before = cpu_ticks()
        timings = alternate({name: step_of(name, body) for name, body in bodies.items()}, case.seconds, warm_up=2)
        after = cpu_ticks()
    return {
        **{f"{name}_ms": round(timing.median / 1e3, 2) for name, timing in timings.items()},
        "share_of_whole": _share(timings, "whole"),
        "share_of_windows": _share(timings, "windows"),
        "share_of_upper": _share(timings, "upper"),
        "steps": timings["tables"].rounds,
        "tokens": case.tokens * case.texts,
        "threads": torch.get_num_threads(),
        "stolen": round((after[1] - before[1]) / max(1, after[0] - before[0]), 4),
    }


def table_of(figures: dict[str, Any]) -> str:
    says = {
        "tables": "adapters on the tables",
        "upper": "the upper layers, which are cut to adapters in the end (--upper-rate), on the tables",
        "whole": "adapters on the original BERT, lower layers computed",
        "windows": "adapters, lower layers computed on the tables' windows",
    }
    lines = [f"a step of {figures['tokens']} tokens, {figures['threads']} threads"]
    for name, text in says.items():
        share = "" if name == "tables" else f"   tables / this: {figures[f'share_of_{name}']:.2f}"
        lines.append(f"{figures[f'{name}_ms']:>10.1f} ms  {text}{share}")
    return "\n".join(lines)


def _share(timings: dict[str, Timing], of: str) -> float:
    return round(timings["tables"].median / timings[of].median, 3)


def _labelled(config: BackboneConfig, tokens: int) -> Labelled:
    rng, known = random.Random(0), words(config.vocabulary)
    texts = [" ".join(rng.choices(known, k=tokens - 2)) for _ in range(TEXTS)]
    examples = [Example(number, text, labels=(rng.choice(("no", "yes")),)) for number, text in enumerate(texts)]
    return Labelled(Path("random words"), examples)


def random_checkpoint(store: Store) -> Checkpoint:
    config = store.config
    layers = config.lower_layers + config.upper_layers
    original = BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.positions,
    )
    weights = dict(BertModel(original, add_pooling_layer=False).state_dict())
    return Checkpoint(config, layers, weights, tokenizer_json(config.vocabulary))
