"""A decoder learns causal windows: first the whole model's states at the split, then what it says of the next token.

Its lower layers learn for a root, with the first of the upper ones. Only its lower layers learn for a domain, from the next
tokens of its corpus. Some windows are shortened while it learns. In exams all are whole, as they are served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.console import passing_bar
from builder.learning.bodies import WholeBody
from builder.learning.distil import WAY_OUT, split_documents
from builder.learning.limits import Budget
from builder.learning.loop import ParameterGroup, Training, half_precision, products_dtype, train
from builder.learning.progress import Exam, Progress
from builder.learning.windows import Shrinking, SplitModel, TextPack, Windowed, in_packs, index_of, reading
from hplm.model.checkpoint import Checkpoint
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack

STATES_SHARE = 0.25  # of a root's budget, in which the lower layers learn the states at the split
LEARNING_UPPER = 4  # upper layers that learn with them
OF_TEXT = 0.2  # the weight of the text's own next tokens, beside 1 for the whole model's
LOWER_RATE, UPPER_RATE, DOMAIN_RATE = 6e-4, 2e-4, 1e-4
EXAMS = 5  # tests on held-out texts; the best state is kept
PIECE = 512  # tokens of a document that are learned together: memory and time of attention grow with their square
ROWS = 256  # whose logits are in memory at a time: a vocabulary has tens of thousands


@dataclass(frozen=True)
class CausalLesson(Windowed):
    before: Tensor  # the indices of the tokens that another one of the same text follows
    following: Tensor  # these other ones
    at_split: Tensor | None  # the whole model's states there
    at_end: Tensor | None  # and what it makes the logits of the following tokens from


class NextTokens(torch.autograd.Function):
    """The loss of next tokens: KL from the whole model's, and OF_TEXT times the cross-entropy of the text's own.

    The gradient is computed with the loss, some rows at a time, because nobody has the memory for all logits.
    """

    @staticmethod
    def forward(ctx: Any, read: Tensor, matrix: Tensor, following: Tensor, taught: Tensor | None) -> Tensor:
        """`read`: what the matrix makes logits from; `taught`: the same of the whole model. Returns the loss of a token."""
        gradient, total = torch.empty_like(read), read.new_zeros((), dtype=torch.float32)
        of_text = OF_TEXT if taught is not None else 1.0
        for rows in _chunks(len(read)):
            logs = logs_of(read[rows], matrix)
            own = following[rows]
            total -= of_text * logs.gather(1, own[:, None]).sum()
            wrong = logs.exp()
            if taught is None:
                wrong.mul_(of_text)
            else:
                wanted = logs_of(taught[rows], matrix)
                chances = wanted.exp()
                total += (chances * (wanted - logs)).sum()
                wrong.mul_(1 + of_text).sub_(chances)
            wrong.scatter_add_(1, own[:, None], wrong.new_full((len(own), 1), -of_text))
            gradient[rows] = (wrong.to(matrix.dtype) @ matrix).to(read.dtype)
        ctx.save_for_backward(gradient / len(read))
        return total / len(read)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * above[0], None, None, None


def logs_of(read: Tensor, matrix: Tensor) -> Tensor:
    """Returns the logarithms of the chances of all next tokens, in 32 bits."""
    return (read.to(matrix.dtype) @ matrix.T).float().log_softmax(1)


def entropies(read: Tensor, matrix: Tensor, following: Tensor) -> Tensor:
    """Returns the cross-entropy of each of the following tokens."""
    chunks = [logs_of(read[rows], matrix).gather(1, following[rows][:, None])[:, 0] for rows in _chunks(len(read))]
    return -torch.cat(chunks)


def _pieces(documents: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the documents in pieces of PIECE tokens, of which each begins with the start id."""
    found: list[np.ndarray] = []
    for document in documents:
        cuts = range(1, max(2, len(document)), PIECE - 1)
        found += [np.concatenate([document[:1], document[cut : cut + PIECE - 1]]) for cut in cuts]
    return [piece for piece in found if len(piece) > 1]


def predicting(lengths: np.ndarray) -> np.ndarray:
    """Returns the indices of the tokens of packed texts that another one of the same text follows."""
    follows = np.ones(int(lengths.sum()), dtype=bool)
    follows[np.cumsum(lengths) - 1] = False
    return np.flatnonzero(follows)


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, rows, ROWS))


def causal_lesson(
    windows: Shrinking, whole: WholeBody | None, texts: list[np.ndarray], chance: np.random.Generator | None,
    to_the_end: bool = True,
) -> CausalLesson:  # fmt: skip
    """`whole`: the model that teaches; None for a domain. `chance`: shortens some windows.

    `to_the_end`: the whole model computes more layers than those up to the split.
    """
    tokens, lengths = np.concatenate(texts), np.array([len(text) for text in texts])
    packed, before = windows(tokens, lengths, chance), predicting(lengths)
    own, rows, following = (index_of(numbers, windows.device) for numbers in (tokens, before, tokens[before + 1]))
    at_split = at_end = None
    if whole is not None and to_the_end:
        at_split, at_end = whole.taught(own, packed.positions, packed.lengths, rows)
    elif whole is not None:
        at_split = whole.at_split(own, packed.positions, packed.lengths)
    return CausalLesson(**vars(packed), before=rows, following=following, at_split=at_split, at_end=at_end)


def learn_windows(
    checkpoint: Checkpoint | None, config: BackboneConfig, lower: LowerStack, upper: UpperStack,
    documents: Sequence[np.ndarray], budget: Budget, seed: int, device: torch.device, saved: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Changes `lower` and, with the whole model's `checkpoint`, the first of the `upper` layers. Returns the report.

    A result that is worse than the start on held-out texts is dropped. After an interruption the same call continues.
    """
    held_out, training = (_pieces(part) for part in split_documents(documents, seed))
    whole = None if checkpoint is None else WholeBody(checkpoint).to(device).eval().requires_grad_(False)
    student = SplitModel(lower, upper).to(device).requires_grad_(False)
    matrix = upper.next_token.weight.detach().to(products_dtype(device))
    lesson, batches = partial(causal_lesson, Shrinking(config, device), whole), partial(reading, config, training, seed, device)
    with half_precision(device):
        packs = passing_bar(in_packs(held_out), "asking the original", unit="batch")
        held = [lesson(texts, None) for texts in packs]
    wanted = sum(len(one.before) for one in held)

    @torch.no_grad()
    def loss_of_all(read: Iterable[Tensor]) -> float:
        pairs = zip(read, held, strict=True)
        return sum(float(entropies(own, matrix, one.following).sum()) for own, one in pairs) / wanted

    of_whole = loss_of_all(one.at_end for one in held if one.at_end is not None) if whole is not None else 0.0

    @torch.no_grad()
    def examined() -> Exam:
        """The score is the whole model's perplexity over that of the halves; of a domain, the chance of a next token."""
        with half_precision(device):
            bar = passing_bar(held, "scoring held-out texts", unit="batch")
            loss = loss_of_all(student(one, one.before)[1] for one in bar)
        return Exam(math.exp(of_whole - loss), round(loss, 4), facts={"perplexity": round(math.exp(loss), 3)})

    def loss_of(texts: TextPack) -> tuple[Tensor, int]:
        given = lesson(*texts)
        _, read = student(given, given.before)
        return NextTokens.apply(read, matrix, given.following, given.at_end), given.tokens

    start = examined() if whole is not None else None  # a domain's training begins with this exam
    before, main = Progress(), budget
    inside = dict(lower.layers.named_parameters("lower.layers"))
    groups = [ParameterGroup(DOMAIN_RATE if checkpoint is None else LOWER_RATE, inside)]
    if checkpoint is not None:
        file = saved.with_name(f"{saved.stem}-states{saved.suffix}") if saved is not None else None
        before = _learn_states(student, lesson, held, batches, groups, budget.part(STATES_SHARE), device, file)
        main = budget.part(1 - STATES_SHARE)
        groups.append(ParameterGroup(UPPER_RATE, dict(upper.layers[:LEARNING_UPPER].named_parameters("upper.layers"))))
    learning = Training("adapting", device, groups, batches, loss_of, examined, WAY_OUT, exams=EXAMS)
    now = train(learning, replace(main, until=budget.until), saved)
    student.requires_grad_(True)
    kept = now.exams[now.kept]
    return {
        "documents": len(documents),
        "held_out_tokens": wanted,
        "seed": seed,
        "perplexity": {
            **({"whole": round(math.exp(of_whole), 3)} if checkpoint is not None else {}),
            "start": (start.facts if start is not None else now.exams[0])["perplexity"],
            "kept": kept["perplexity"],
        },
        "tokens": before.units + now.units,
        "steps_at_split": before.steps,
        **now.reported(),
        "seconds": round(before.seconds + now.seconds, 1),
    }


def _learn_states(
    student: SplitModel, lesson: Callable[..., CausalLesson], held: Sequence[CausalLesson], batches: Any,
    groups: Sequence[ParameterGroup], budget: Budget, device: torch.device, saved: Path | None,
) -> Progress:  # fmt: skip
    """Trains the lower layers on the whole model's states at the split. A text's first token has its own exactly."""
    states = [one.at_split[one.positions > 0] for one in held if one.at_split is not None]
    variance = float(torch.cat(states).float().var(0, unbiased=False).sum())

    def error_of(given: CausalLesson) -> Tensor:
        assert given.at_split is not None
        rows = given.positions > 0
        own, wanted = student.entered(given)[rows].float(), given.at_split[rows].float()
        return (own - wanted).square().sum() / (len(own) * variance)

    def loss_of(texts: TextPack) -> tuple[Tensor, int]:
        given = lesson(*texts, to_the_end=False)
        return error_of(given), given.tokens

    @torch.no_grad()
    def examined() -> Exam:
        with half_precision(device):
            errors = [(float(error_of(one)), one.tokens) for one in held]
        error = sum(own * tokens for own, tokens in errors) / sum(tokens for _, tokens in errors)
        return Exam(1 - error, error)

    return train(Training("adapting to the split", device, groups, batches, loss_of, examined, WAY_OUT), budget, saved)
