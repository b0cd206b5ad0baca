"""Ways to teach students, and what they are compared with: of one task, with one seed and one teacher.

All ways learn the same texts, and what the same teacher says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from builder.exits.heads import MOST_ROWS, learned, outputs_of, states_of
from builder.learning.bodies import PlotBody
from builder.students.boosting import Seen, answers_of_prefixes, boosted, learn_member, learn_together, seen_by
from builder.students.build import extended, team_of
from builder.students.options import StudentOptions
from builder.students.team import StudentTeam
from builder.tasks.lookup import Pack, Text, Texts
from builder.tasks.tasks import TrainingTask
from builder.training.data import Data
from builder.training.finetuning import Trained, TrainingOptions, finetune, logits_of
from hplm.adapters.layout import exit_layout
from research.papers.augmentation import augmented
from research.schemes.teachers import dedicated

TIE = 1e-3  # of a vote: how much the members' confidence counts
Scored = dict[str, list[float]]  # "dev" and "test": the scores of one student, of two, and so on
Variants = dict[str, Scored]
Left = Sequence[list[Tensor]]  # what is still missing of the rows of train and dev
Way = Literal["teacher", "team", "stacking", "hardest", "augmented", "longer", "bagging", "plain", "equal", "exit"]


class AveragedTeam(StudentTeam):
    """Takes the mean of its members' rows, where another team takes the sum."""

    def joined(self, rows: Tensor) -> Tensor:
        return rows.cumsum(0) / torch.arange(1, len(rows) + 1, device=rows.device).view(-1, 1, 1)


@dataclass(frozen=True)
class StudentCase:
    """A task and a seed."""

    data: Data
    test: Texts
    options: StudentOptions
    training: TrainingOptions  # of the teacher
    folder: Path  # of savepoints

    @cached_property
    def teacher(self) -> Trained:
        saved = self.saved("teacher") / "learning.pt"
        if not self.training.rank:
            return dedicated(self.data, self.training, saved)
        return finetune(PlotBody.of(self.data.reader.store), self.data, self.training, saved)

    @cached_property
    def seen(self) -> tuple[Seen, Seen]:
        """Returns what the teacher says of train and dev."""
        body, model = self.teacher.body, self.teacher.model
        return seen_by(body, model, self.data, self.data.train), seen_by(body, model, self.data, self.data.dev)

    @cached_property
    def body(self) -> PlotBody:
        return PlotBody.of(self.data.reader.store).to(self.data.device).eval().requires_grad_(False)

    def saved(self, way: str) -> Path:
        (folder := self.folder / way).mkdir(parents=True, exist_ok=True)
        return folder

    def team(self, kind: type[StudentTeam] = StudentTeam, **changes: Any) -> tuple[StudentTeam, StudentOptions]:
        options = replace(self.options, **changes)
        return team_of(self.data, self.teacher.model, options, self.training.dtype, kind), options

    def together(self, team: StudentTeam, options: StudentOptions, way: str) -> Scored:
        learn_together(self.body, team, self.data, self.seen[0], options, self.saved(way))
        return self.scored(partial(answers_of_prefixes, self.body, team))

    def taught(
        self, way: str, further: Sequence[Text] = (), learn: Callable[..., None] = learn_member, **changes: Any
    ) -> Scored:
        """Scores students as `hplm tenant students` makes them, with further texts and these changes of the options.

        `learn`: teaches a member.
        """
        data, (seen, of_dev) = self.data, self.seen
        if further:
            data = extended(data, further)
            seen = seen_by(self.teacher.body, self.teacher.model, data, data.train)
        made, options = self.team(**changes)
        boosted(self.body, made, data, (seen, of_dev), options, self.saved(way), learn)
        learn_together(self.body, made, data, seen, options, self.saved(way))
        return self.scored(partial(answers_of_prefixes, self.body, made))

    def scored(self, answers: Callable[[Data], Sequence[Sequence[Sequence[str]]]]) -> Scored:
        """Returns scores on dev and test. `answers`: to the dev texts of data, by the number of students."""
        found: Scored = {}
        for name, texts in (("dev", self.data.dev), ("test", self.test)):
            data = replace(self.data, dev=texts)
            found[name] = [round(data.task.score(data.labels, texts.examples, own).main, 5) for own in answers(data)]
        return found

    def votes(self, team: StudentTeam) -> Scored:
        """Returns the scores of members that answer each for themselves: most of them decide."""

        def answers(data: Data) -> list[list[list[str]]]:
            members = range(len(team.members))
            own = data.by_text(
                data.dev, lambda pack: torch.stack([team.read(team.rows(self.body, pack, i)) for i in members], dim=1)
            )
            return [data.answers(data.dev, [elected(data.task, each[:, : i + 1]).numpy() for each in own]) for i in members]

        return self.scored(answers)


def elected(task: TrainingTask, logits: Tensor) -> Tensor:
    """Returns logits of what most members say, from rows x members x labels. Of numbers it is the median."""
    if task.served.is_number:
        return logits.quantile(0.5, dim=1)
    if not task.one_label_a_row:  # each label by itself
        return (logits > 0).float().mean(1) - 0.5 + TIE * logits.mean(1).tanh()
    return one_hot(logits.argmax(2), logits.shape[2]).float().mean(1) + TIE * logits.softmax(2).mean(1)


def teacher(case: StudentCase) -> Variants:
    """Scores the tenant's full stack, or a BERT that is fine-tuned in full."""
    body, model = case.teacher.body, case.teacher.model
    return {"teacher": case.scored(lambda data: [data.answers(data.dev, logits_of(body, model, data, data.dev))])}


def team(case: StudentCase) -> Variants:
    """Scores students as `hplm tenant students` makes them. Before they learn together, the teacher's head reads their sum."""
    made, options = case.team()
    boosted(case.body, made, case.data, case.seen, options, case.saved("team"))
    alone = case.scored(partial(answers_of_prefixes, case.body, made))
    return {"no together": alone, "team": case.together(made, options, "team"), "vote": case.votes(made)}


def stacking(case: StudentCase) -> Variants:
    """Scores such students where the middle of each also learns the sum of those before it."""
    if case.options.depth == 1:  # which has no middle
        return {}

    def learn(body: PlotBody, team: StudentTeam, data: Data, seen: Seen, left: Left, number: int, *given: Any) -> None:
        def middle(pack: Pack, chosen: np.ndarray, wanted: Tensor) -> Tensor:
            before = torch.cat([seen.rows[i] for i in chosen]).to(wanted.device) - wanted
            states = team.members[number].states(body, pack, team.depth)
            return (states[-(-team.depth // 2)][pack.reading] - before).square().mean()

        learn_member(body, team, data, seen, left, number, *given, beside=middle if number else None)

    return {"stacking": case.taught("stacking", learn=learn)}


def hardest(case: StudentCase) -> Variants:
    """Scores such students where each but the first learns the hardest fifth of the texts, and a fifth at random."""

    def learn(body: PlotBody, team: StudentTeam, data: Data, seen: Seen, left: Left, number: int, *given: Any) -> None:
        among = lesson_of(left[0], number, case.options.seed) if number else None
        learn_member(body, team, data, seen, left, number, *given, among=among)

    return {"hardest": case.taught("hardest", learn=learn)}


def lesson_of(left: Sequence[Tensor], number: int, seed: int, share: float = 0.2) -> np.ndarray:
    """Returns the numbers of a share of the texts, those of which most is missing, and as many at random.

    `left`: what is missing of each text's rows.
    """
    hardest = np.argsort([-float(rows.square().mean()) for rows in left], kind="stable")
    drawn = np.random.default_rng([seed, number]).permutation(len(left))
    count = max(1, round(share * len(left)))
    return np.union1d(hardest[:count], drawn[:count])


def more_texts(case: StudentCase) -> Variants:
    """Scores such students that also learn a copy of each text with guessed words."""
    more = augmented(case.body, case.data, case.options.seed) if case.data.task.one_label_a_row else []
    return {"augmented": case.taught("augmented", more)} if more else {}  # some domains have no masked head


def longer(case: StudentCase) -> Variants:
    """Scores such students after twice as many epochs, which take as long as learning as many texts again."""
    return {"longer": case.taught("longer", epochs=2 * case.options.epochs)}


def bagging(case: StudentCase) -> Variants:
    """Scores students that each learn the teacher's rows of a bootstrap sample. Their rows are averaged."""
    made, together = case.team(AveragedTeam)
    seen, left = case.seen[0], [part.rows for part in case.seen]
    for number in range(case.options.students):
        one, options = case.team(seed=case.options.seed + 1000 * number)
        one.add()
        drawn = np.random.default_rng([case.options.seed, number]).integers(len(seen.rows), size=len(seen.rows))
        learn_member(case.body, one, case.data, seen, left, 0, options, case.saved(f"bagging-{number}"), drawn)
        made.members.append(one.members[0])
    alone = case.scored(partial(answers_of_prefixes, case.body, made))
    joint = case.together(made, together, "bagging")
    return {"bagging, no together": alone, "bagging": joint, "bagging, vote": case.votes(made)}


def plain(case: StudentCase) -> Variants:
    """Scores one LoRA on the same layers. It learns what a team learns together, in as many epochs as the first student."""
    made, options = case.team(epochs=2 * case.options.epochs)
    made.add()
    return {"plain": case.together(made, options, "plain")}


def equal(case: StudentCase) -> Variants:
    """Scores one LoRA of the size of all students, after as few epochs or as many as all of them; dev chooses."""
    tried = []
    for times in (1, case.options.students):
        epochs, rank = 2 * times * case.options.epochs, case.options.students * case.options.rank
        made, options = case.team(epochs=epochs, rank=rank)
        made.add()
        tried.append(case.together(made, options, f"equal-{times}"))
    return {"equal": max(tried, key=lambda scored: scored["dev"])}


def early_exit(case: StudentCase) -> Variants:
    """Scores the head of an exit behind the same layers of the tenant's full stack, at which all texts leave."""
    body, data, depth = case.body, case.data, case.options.depth
    if data.task.distance is None or not case.training.rank or depth == data.config.upper_layers:  # there is no exit
        return {}
    learning = states_of(body, case.teacher.model, replace(data, dev=data.train), MOST_ROWS)
    layout = exit_layout(data.config, len(data.labels), case.training.dtype)
    (head,) = learned(replace(learning, exits=learning.exits[depth : depth + 1]), layout, data.task, case.options.seed)

    def answers(data: Data) -> list[list[list[str]]]:
        judged = states_of(body, case.teacher.model, data)
        outputs = outputs_of(head, layout, judged.exits[depth])
        return [data.answers(data.dev, judged.of_texts(outputs))]

    return {"exit": case.scored(answers)}


WAYS: dict[Way, Callable[[StudentCase], Variants]] = {  # each returns nothing if there is no such way
    "teacher": teacher, "team": team, "stacking": stacking, "hardest": hardest, "augmented": more_texts, "longer": longer,
    "bagging": bagging, "plain": plain, "equal": equal, "exit": early_exit,
}  # fmt: skip
