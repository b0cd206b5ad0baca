"""Teaches students: each learns what those before it have not learned of the teacher's rows, then all learn the task together.

After Student Parallelism (its Eq. 1 and 2, and Alg. 1 and 2): boosting in the space of the row that the teacher's head reads,
then one classifier over the sum, with a loss for every prefix of the members, so that any number of them answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from builder.learning.bodies import Body, PlotBody
from builder.learning.limits import Epochs
from builder.learning.loop import Exam, Group, Training, train
from builder.packed_batches import packed_batches
from builder.store.resumable import Savepoint
from builder.students.team import StudentTeam
from builder.tasks.lookup import Pack, Texts
from builder.training.data import Data
from builder.training.finetuning import PACK_TOKENS
from builder.training.model import TenantModel

WAY_OUT = "Use a smaller --learning-rate"


@dataclass(frozen=True)
class StudentOptions:
    depth: int  # upper layers of a member
    students: int = 6  # at most
    rank: int = 16
    epochs: int = 3  # of each member, and of all together
    learning_rate: float = 1e-3
    stacking: float = 0.0  # weight of the loss that lets a member's middle layer learn the sum of those before it
    batch_texts: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """What the teacher says of texts: the rows that its head reads, and the logits, text by text."""

    rows: list[Tensor]
    logits: list[Tensor]

    def of(self, chosen: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        rows, logits = (torch.cat([part[i] for i in chosen]).to(device) for part in (self.rows, self.logits))
        return rows, logits


@torch.no_grad()
def seen_by(body: Body, model: TenantModel, data: Data, texts: Texts) -> Seen:
    found: tuple[list[Tensor], list[Tensor]] = ([torch.empty(0)] * len(texts.texts), [torch.empty(0)] * len(texts.texts))
    for chosen, pack in _packs(data, texts, body.reads_tables):
        hidden = model.hidden(body, pack)
        for kept, own in zip(found, (hidden, model.read(hidden)), strict=True):
            for i, part in zip(chosen, own.float().cpu().split(pack.rows_of), strict=True):
                kept[i] = part
    return Seen(*found)


def boosted(
    body: PlotBody, team: StudentTeam, data: Data, teacher: tuple[Seen, Seen], options: StudentOptions, folder: Path,
    show_progress: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Adds members to a team. Returns what the report says of each.

    It ends early when one more member leaves no less of the teacher's rows on texts that it has not learned.
    """
    left = [seen.rows for seen in teacher]  # what is still missing, of train and dev
    whole = float(torch.cat(left[0]).square().mean())
    told: list[dict[str, Any]] = []
    for number in range(options.students):
        team.add()
        missing = float(torch.cat(left[1]).square().mean())
        _learn(body, team, data, teacher[0], left, whole, number, options, folder, show_progress)
        with torch.no_grad():
            own = [_rows(body, team, data, texts, number) for texts in (data.train, data.dev)]
            flat, wanted = torch.cat(own[0]), torch.cat(left[0])
            alpha = float((flat * wanted).sum() / flat.square().sum())  # the exact line search
            after = [
                [missed - alpha * rows for missed, rows in zip(*pair, strict=True)] for pair in zip(left, own, strict=True)
            ]
            residual = float(torch.cat(after[1]).square().mean())
            if alpha <= 0 or residual >= missing:
                del team.members[number]
                break
            for part in ("weight", "bias"):
                team.members[number].head[part].mul_(alpha)
        left = after
        told.append({"alpha": round(alpha, 4), "residual": round(residual / whole, 5)})
    return told


def learn_together(
    body: PlotBody, team: StudentTeam, data: Data, teacher: Seen, options: StudentOptions, folder: Path, show_progress: bool
) -> None:
    """Teaches all members and the classifier the labels, and the teacher's logits. All prefixes have the same weight."""

    def loss_of(chosen: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, chosen, data.device)
        _, wanted = teacher.of(chosen.tolist(), data.device)
        losses = []
        for logits in team.prefixes(body, pack):
            loss, learned = data.task.loss(logits, pack.targets, pack.rows_of, team.spread)
            losses.append(loss / max(1, learned) + data.task.apart(logits, wanted, team.spread))
        return torch.stack(losses).mean(), len(chosen)

    def examined() -> Exam:
        scores = [data.task.score(data.labels, data.dev.examples, own) for own in answers_of_prefixes(body, team, data)]
        mean = sum(own.main for own in scores) / len(scores)
        return Exam(mean, -mean, max(own.error for own in scores))

    named = dict(team.named_parameters())
    _train("students together", data, named, loss_of, examined, options, folder / "together.pt", show_progress)


@torch.no_grad()
def answers_of_prefixes(body: PlotBody, team: StudentTeam, data: Data) -> list[list[list[str]]]:
    """Returns the answers to dev of each prefix, example by example."""
    texts, served = data.dev.texts, data.task.served
    answers: list[list[list[str]]] = [[[]] * len(texts) for _ in team.members]
    for chosen, pack in _packs(data, data.dev):
        for own, rows in zip(answers, team.prefixes(body, pack), strict=True):
            for i, part in zip(chosen, np.split(rows.cpu().numpy(), np.cumsum(pack.rows_of)[:-1]), strict=True):
                own[i] = served.answer(part, texts[i].spans, data.labels).labels
    return answers


def _learn(
    body: PlotBody, team: StudentTeam, data: Data, teacher: Seen, left: Sequence[list[Tensor]], whole: float, number: int,
    options: StudentOptions, folder: Path, show_progress: bool,
) -> None:  # fmt: skip
    def loss_of(chosen: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, chosen, data.device)
        wanted = torch.cat([left[0][i] for i in chosen]).to(data.device)
        if not number or options.depth == 1 or not options.stacking:
            return (team.rows(body, pack, number) - wanted).square().mean() / whole, len(chosen)
        before = teacher.of(chosen.tolist(), data.device)[0] - wanted  # what all members before it say together
        rows, half = team.rows_and_half(body, pack, number)
        apart = (rows - wanted).square().mean() + options.stacking * (half - before).square().mean()
        return apart / whole, len(chosen)

    @torch.no_grad()
    def examined() -> Exam:
        apart = torch.cat(_rows(body, team, data, data.dev, number)) - torch.cat(left[1])
        loss = float(apart.square().mean()) / whole
        return Exam(-loss, loss)

    named = dict(team.members[number].named_parameters())
    title = f"student {number + 1} of {options.students}"
    _train(title, data, named, loss_of, examined, options, folder / f"student-{number}.pt", show_progress)


def _train(
    title: str, data: Data, learning: dict[str, nn.Parameter], loss: Callable[[np.ndarray], tuple[Tensor, int]],
    exam: Callable[[], Exam], options: StudentOptions, saved: Path, show_progress: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(options.seed)
    epochs = [list(packed_batches(data.train.lengths, PACK_TOKENS, options.batch_texts, rng)) for _ in range(options.epochs)]
    training = Training(
        title, data.device, [Group(options.learning_rate, learning)],
        lambda first: islice(chain.from_iterable(epochs), first, None), loss, exam, WAY_OUT, start_counts=False,
        betas=(0.9, 0.999),
    )  # fmt: skip
    train(training, Epochs([len(epoch) for epoch in epochs], options.epochs), Savepoint(saved), show_progress)


def _rows(body: PlotBody, team: StudentTeam, data: Data, texts: Texts, number: int) -> list[Tensor]:
    """Returns what a member says of each text's rows."""
    found: list[Tensor] = [torch.empty(0)] * len(texts.texts)
    for chosen, pack in _packs(data, texts):
        for i, part in zip(chosen, team.rows(body, pack, number).float().cpu().split(pack.rows_of), strict=True):
            found[i] = part
    return found


def _packs(data: Data, texts: Texts, with_sums: bool = True) -> Iterator[tuple[list[int], Pack]]:
    for chosen in packed_batches(texts.lengths, PACK_TOKENS, len(texts.texts)):
        yield chosen.tolist(), data.reader.pack(texts, chosen, data.device, with_sums)
