"""A small grid over learning rate and batch size. Its trainings run side by side as far as they fit on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from builder.learning.bodies import PlotBody
from builder.learning.loop import Diverged
from builder.said import no_progress_bars, progress_bar
from builder.store.resumable import Savepoint
from builder.tasks.scores import Scores
from builder.training.data import Data
from builder.training.finetuning import Train, Trained, TrainingOptions, finetune, tenant_model
from builder.worker_processes import processes_that_fit, worker_processes

FACTORS = (0.5, 1.0, 2.0)  # of the given learning rate
BATCHES = (8, 32)  # texts


def points(options: TrainingOptions) -> list[TrainingOptions]:
    return [
        replace(options, learning_rate=factor * options.learning_rate, body_rate=factor * options.body_rate, batch_texts=batch)
        for factor, batch in product(FACTORS, BATCHES)
    ]


def train_grid(
    data: Data, options: Sequence[TrainingOptions], folder: Path, trainer: Train = finetune
) -> tuple[Trained, list[dict[str, Any]]]:
    """Returns the point with the best dev score, the first of equals, and what a report says of each point.

    Finished points in `folder` are not trained again.
    """
    count = 1 if data.device.type != "cpu" else processes_that_fit(len(options))
    threads = max(1, torch.get_num_threads() // len(options))  # independent of how many run at once: same numbers
    files = [folder / f"point-{number}" for number in range(len(options))]
    jobs = [partial(_try, data, point, file, threads, trainer) for point, file in zip(options, files, strict=True)]
    bar = partial(progress_bar, title=f"training, {count} at a time", total=len(jobs), unit="training")
    if count == 1:
        for job in bar(jobs):
            job()
    else:
        with worker_processes(count) as pool:
            for done in bar([pool.submit(job) for job in jobs]):
                done.result()
    results = [Savepoint(file.with_suffix(".done")).load() or {} for file in files]  # every training has ended
    scores = [result["main"] for result in results]  # None of those that diverged
    finished = [number for number, score in enumerate(scores) if score is not None]
    if not finished:
        raise Diverged("every point of the grid diverged: use a smaller --learning-rate")
    best = max(finished, key=scores.__getitem__)
    tried = [
        {"learning_rate": one.learning_rate, "batch_texts": one.batch_texts, "dev": None if score is None else round(score, 4)}
        for one, score in zip(options, scores, strict=True)
    ]
    kept, model = results[best], tenant_model(data.config, len(data.labels), options[best])
    model.load_state_dict(kept["model"])
    body = PlotBody.of(data.reader.store).to(data.device)
    return Trained(body, model.to(data.device), Scores(kept["rows"], kept["metric"], kept["values"]), kept["report"]), tried


@no_progress_bars()
def _try(data: Data, options: TrainingOptions, file: Path, threads: int, trainer: Train) -> None:
    done = Savepoint(file.with_suffix(".done"))
    if done.load() is not None:
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trained = trainer(PlotBody.of(data.reader.store), data, options, file.with_suffix(".pt"))
    except Diverged:
        done.save({"main": None})
    else:
        scores = trained.scores
        done.save({"main": scores.main, **vars(scores), "model": trained.model.state_dict(), "report": trained.report})
    finally:
        torch.set_num_threads(before)
