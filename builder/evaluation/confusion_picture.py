"""The picture of `hplm evaluate`: right labels against answered labels."""

from __future__ import annotations

from pathlib import Path

from builder.evaluation.tenant import Evaluation
from builder.pictures import INK, panels, save
from builder.tasks.scores import confusion
from builder.tasks.tasks import TRAINING_TASKS, training_task
from hplm.errors import InvalidInput

MOST_LABELS = 60  # more cannot be read in a picture
MOST_NUMBERED = 20


def draw_confusion(evaluation: Evaluation, path: Path) -> None:
    """Draws the picture. Rows are shares of the right label; the path's suffix says which format."""
    tenant = evaluation.tenant
    if not training_task(tenant.task).one_label_a_row or len(tenant.labels) > MOST_LABELS:
        able = " and ".join(name for name, task in TRAINING_TASKS.items() if task.one_label_a_row)
        raise InvalidInput(
            f"--picture shows right against answered labels, for {able} with up to "
            f"{MOST_LABELS} labels; tenant {tenant.id!r} has the task {tenant.task} and {len(tenant.labels)}"
        )
    wanted = [label for example in evaluation.labelled.examples for label in example.labels]
    answered = [label for answer in evaluation.answers for label in answer]
    pairs = confusion(tenant.labels, wanted, answered)
    answers = [*tenant.labels, "(none)"] if pairs[:, -1].any() else list(tenant.labels)
    pairs = pairs[:, : len(answers)]
    shares = pairs / pairs.sum(1, keepdims=True).clip(1)
    size = 2.5 + 0.32 * min(len(tenant.labels), 40)
    figure, (axes,) = panels(size + 1, size)
    axes.grid(False)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(answers)), answers, rotation=90, parse_math=False)  # a label may contain two dollar signs
    axes.set_yticks(range(len(tenant.labels)), tenant.labels, parse_math=False)
    if len(tenant.labels) <= MOST_NUMBERED:
        for (row, column), count in ((at, pairs[at]) for at in zip(*pairs.nonzero(), strict=True)):
            color = "white" if shares[row, column] > 0.5 else INK
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xlabel("answered")
    axes.set_ylabel("right")
    axes.set_title(f"{tenant.id} version {tenant.version}", loc="left", color=INK)
    figure.colorbar(image, ax=axes, label="share of the right label")
    save(figure, path)
