"""`python -m research.generating`: how well hPLMs of a decoder predict and write (HMI's Tables 4, 9 and 11).

Only ratios count: the decoder is a dequantised file, and may have read these docstrings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.rows import Device, OtherModel, Positive
from bench.run import app_of
from builder.evaluation.comparison import baselines
from builder.evaluation.perplexity import Predictor
from builder.evaluation.writing import evaluate_writing
from builder.importing.adapter_import import plain_tenant
from builder.learning.limits import Budget
from builder.tables.root import RootOptions, build_root
from builder.tasks.tasks import training_task
from builder.training.build import build_tenant
from demo.building import fingerprint, named, packaged
from demo.data import DemoTenant, stored, write_demo_data, write_lines
from demo.domains import DOMAINS
from demo.generating import MODEL_PACKAGE, PLAIN, TRAINING
from demo.rewriting import REWRITING
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.tasks.tasks import GENERATE
from research.options import run
from research.schemes.decoders import SCHEMES
from research.schemes.rivals import score

SIZES = {"train": 400, "dev": 60, "test": 100}

app = app_of("python -m research.generating", __doc__)


@app.default
def generating(
    *, splits: tuple[str, ...] = ("6+24",), windows: tuple[int, ...] = (3,), minutes: Positive = 5.0,
    steps: int | None = None, keep: float = 0.05, against: tuple[str, ...] = (), seeds: int = 1,
    work: Path = Path(".hplm/generating"), model: OtherModel = "", device: Device = "auto",
) -> None:  # fmt: skip
    """Prints perplexities over the whole model's and, of the first split and window, ROUGE of three tasks.

    The same command goes on after an interruption.

    :param splits: lower and upper layers
    :param windows: tokens in a window
    :param minutes: of learning windows
    :param steps: instead of minutes
    :param keep: share of the n-grams in the table
    :param against: schemes that are trained for each task
    :param seeds: of each scheme
    :param work: folder of data and stores
    """
    if unknown := set(against) - {*SCHEMES}:
        raise InvalidInput(f"unknown scheme {min(unknown)!r}: choose from {', '.join(SCHEMES)}")
    shapes = [(*map(int, split.split("+")), window) for split in splits for window in windows]
    source, on = model or str(packaged(MODEL_PACKAGE, ".gguf")), resolve_device(device)
    home = work / fingerprint(named(source), further=False)
    data = stored(home / "data", {"sizes": SIZES}, lambda: write_demo_data(home / "data", DOMAINS, REWRITING, SIZES))
    plain = _plain_texts(home / "data" / "plain.jsonl", data.tenants)
    budget = Budget(minutes=minutes) if steps is None else Budget(steps=steps)
    length = f"{minutes:g} minutes" if steps is None else f"{steps} steps"
    stores = []
    for lower, upper, window in shapes:
        options = RootOptions(keep=keep, name="hgpt", lower=lower, upper=upper, window=Window(window, causal=True))
        folder = home / f"{lower}+{upper}-{window}-{length.replace(' ', '-')}-{keep:g}"
        store, _ = build_root(source, [domain.corpus for domain in data.domains], folder, options, budget, on)
        predictor = Predictor(store, plain_tenant(store, PLAIN), training_task(GENERATE).read(plain), on)
        share, error = predictor.by_tenant().over(predictor.by_original())
        print(f"\n{lower} + {upper} layers, windows of {window}, {length}")
        print(f"perplexity of held-out docstrings over the whole model's: {share:.3f} +- {error:.3f}", flush=True)
        stores.append(store)
    print()
    for task in data.tenants:
        tenant = build_tenant(stores[0], task.id, "root", GENERATE, task.train, task.dev, device=on, **TRAINING)
        texts = Predictor(stores[0], tenant, training_task(GENERATE).read(task.test), on).texts
        evaluation = evaluate_writing(stores[0], tenant, texts, on)
        print(f"{task.id}: {', '.join(f'{name} {value:.4f}' for name, value in evaluation.scores.values.items())}", flush=True)
        for name, one in baselines(stores[0], evaluation, dict.fromkeys(against, score), seeds, on, None, None):
            print(f"{task.id}, {name}: {one.scores.main:.4f}, {one}", flush=True)


def _plain_texts(path: Path, tasks: Sequence[DemoTenant]) -> Path:
    """Writes docstrings that no corpus has: those whose first sentence a tenant is asked for."""
    (asked,) = [task for task in tasks if task.id == "summary"]
    lines = map(json.loads, asked.test.read_text("utf-8").splitlines())
    texts = (f"{line['target'].strip()} {line['text'].partition(chr(10))[0]}" for line in lines)
    write_lines(path, (json.dumps({"text": "", "target": text}) for text in texts))
    return path


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
