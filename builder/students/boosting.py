"""Teaches students: each learns what those before it have not learned of the teacher's rows, then all learn the task together.

After Student Parallelism (its Eq. 1 and 2, and Alg. 1 and 2): boosting in the space of the row that the teacher's head reads,
then one classifier over the sum, with a loss for every prefix of the members, so that any number of them answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from builder.learning.bodies import Body, PlotBody
from builder.learning.limits import Epochs
from builder.learning.loop import ParameterGroup, Training, train
from builder.learning.progress import Exam
from builder.students.options import StudentOptions
from builder.students.team import StudentTeam
from builder.tasks.lookup import Pack, Texts
from builder.training.data import Data
from builder.training.model import TenantModel
from hplm.errors import InvalidInput

WAY_OUT = "Use a smaller --learning-rate"
Beside = Callable[[Pack, np.ndarray, Tensor], Tensor]  # of some texts, their numbers, and what a member is to say of them


@dataclass(frozen=True)
class Seen:
    """Holds what a teacher says of texts: of each the rows that its head reads, and their logits."""

    rows: list[Tensor]
    logits: list[Tensor]


def seen_by(body: Body, model: TenantModel, data: Data, texts: Texts) -> Seen:
    """Returns what a teacher's body and model say of texts."""

    def rows_and_logits(pack: Pack) -> Tensor:
        hidden = model.hidden(body, pack)
        return torch.cat([hidden, model.read(hidden)], dim=1)

    both = [part.split([data.config.hidden, len(data.labels)], dim=1) for part in data.by_text(texts, rows_and_logits)]
    return Seen(*map(list, zip(*both, strict=True)))


def learn_member(
    body: PlotBody, team: StudentTeam, data: Data, teacher: Seen, left: Sequence[list[Tensor]], number: int,
    options: StudentOptions, folder: Path, among: np.ndarray | None = None, beside: Beside | None = None,
) -> None:  # fmt: skip
    """Teaches a member what is left of the teacher's rows on train and dev.

    `among`: the texts that it learns; None: all. `beside`: gives a further loss.
    """
    whole = _square(teacher.rows)

    def loss_of(chosen: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, chosen, data.device)
        wanted = torch.cat([left[0][i] for i in chosen]).to(data.device)
        apart = (team.rows(body, pack, number) - wanted).square().mean()
        if beside is not None:
            apart = apart + beside(pack, chosen, wanted)
        return apart / whole, len(chosen)

    def examined() -> Exam:
        own = torch.cat(data.by_text(data.dev, partial(team.rows, body, number=number)))
        loss = float((own - torch.cat(left[1])).square().mean()) / whole
        return Exam(-loss, loss)

    title = f"student {number + 1} of {options.students}"
    _train(title, data, team.members[number], loss_of, examined, options, folder / f"student-{number}.pt", among)


def boosted(
    body: PlotBody, team: StudentTeam, data: Data, teacher: tuple[Seen, Seen], options: StudentOptions, folder: Path,
    learn: Callable[..., None] = learn_member,
) -> list[dict[str, Any]]:  # fmt: skip
    """Adds members to a team. Returns what the report says of each.

    It ends early when one more member leaves no less of the teacher's rows on texts that it has not learned. `learn`: teaches
    a member, as `learn_member` does.
    """
    left = [seen.rows for seen in teacher]  # what is still missing, of train and dev
    whole, told = _square(left[0]), list[dict[str, Any]]()
    for number in range(options.students):
        team.add()
        learn(body, team, data, teacher[0], left, number, options, folder)
        own_rows = partial(team.rows, body, number=number)
        own = [data.by_text(texts, own_rows) for texts in (data.train, data.dev)]
        gained = sum(float((rows * missed).sum()) for rows, missed in zip(own[0], left[0], strict=True))
        alpha = gained / (sum(float(rows.square().sum()) for rows in own[0]) or math.nan)  # the exact line search
        for rows, missed in zip(chain(*own), chain(*left), strict=True):
            rows.mul_(-alpha).add_(missed)  # in place: it is then what is missing after this member
        if not (alpha > 0 and (residual := _square(own[1])) < _square(left[1])):  # also where its rows are zero
            del team.members[number]
            break
        with torch.no_grad():
            for part in ("weight", "bias"):
                team.members[number].head[part].mul_(alpha)
        left = own
        told.append({"alpha": round(alpha, 4), "residual": round(residual / whole, 5)})
    if not told:
        raise InvalidInput("the first student learns nothing of the teacher's rows: give it more --layers or --epochs")
    return told


def _square(rows: Sequence[Tensor]) -> float:
    """Returns the mean square of the numbers in the rows of all texts, one by one: together they may be large."""
    return sum(float(own.square().sum()) for own in rows) / sum(own.numel() for own in rows)


def learn_together(body: PlotBody, team: StudentTeam, data: Data, teacher: Seen, options: StudentOptions, folder: Path) -> None:
    """Teaches all members and the classifier the labels, and the teacher's logits. All prefixes have the same weight."""

    def loss_of(chosen: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, chosen, data.device)
        wanted = torch.cat([teacher.logits[i] for i in chosen]).to(data.device)
        losses = []
        for logits in team.prefixes(body, pack):
            loss, learned = data.task.loss(logits, pack.targets, pack.rows_of, team.spread)
            losses.append(loss / max(1, learned) + data.task.apart(logits, wanted, team.spread))
        return torch.stack(losses).mean(), len(chosen)

    def examined() -> Exam:
        scores = [data.task.score(data.labels, data.dev.examples, own) for own in answers_of_prefixes(body, team, data)]
        mean = sum(own.main for own in scores) / len(scores)
        return Exam(mean, -mean, max(own.error for own in scores))

    _train("students together", data, team.parts(), loss_of, examined, options, folder / "together.pt")


def answers_of_prefixes(body: PlotBody, team: StudentTeam, data: Data) -> list[list[list[str]]]:
    """Returns the answers to dev of each prefix, example by example."""
    logits = data.by_text(data.dev, lambda pack: torch.stack(team.prefixes(body, pack), dim=1))
    return [data.answers(data.dev, [part[:, number].numpy() for part in logits]) for number in range(len(team.members))]


def _train(
    title: str, data: Data, learning: nn.Module, loss: Callable[[np.ndarray], tuple[Tensor, int]], exam: Callable[[], Exam],
    options: StudentOptions, saved: Path, among: np.ndarray | None = None,
) -> None:  # fmt: skip
    epochs = Epochs(data.batches(options.epochs, options.batch_texts, options.seed, among), options.epochs)
    parameters = ParameterGroup(options.learning_rate, dict(learning.named_parameters()))
    training = Training(
        title, data.device, [parameters], epochs.starting, loss, exam, WAY_OUT, start_counts=False, betas=(0.9, 0.999),
    )  # fmt: skip
    train(training, epochs, saved)
