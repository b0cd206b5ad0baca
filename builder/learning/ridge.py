"""The closed-form start: ridge regression sets the linear parts of a student from the teacher's hidden states.

A stack that was never trained on three-token windows returns noise. Its last matrix, the position table and the entering norm
are linear in what comes before them, up to layer norms that are linearised here. Solving for them takes seconds; on MiniLM it
explains two thirds of the teacher's variance, where gradient steps alone would need many minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builder.learning.bodies import WholeBody
from builder.learning.windows import Lesson, SplitModel
from hplm.model.stacks import UpperStack

RIDGE = 0.5  # strength, in average tokens for each unknown: keeps a small corpus from large errors
RIDGE_POSITIONS = 0.5
DAMPING = 0.1  # of a norm's median weight: dimensions with almost no weight stay as they are


@torch.no_grad()
def fit(student: SplitModel, teacher: WholeBody, lessons: Sequence[Lesson]) -> None:
    _fit_sums(student, teacher, lessons)
    if student.upper.config.enters_normed:
        _fit_norm(student, lessons)


def _fit_sums(student: SplitModel, teacher: WholeBody, lessons: Sequence[Lesson]) -> None:
    """Makes one Gauss-Newton step for the lower stack's last matrix and the tables added to its sums, at a constant gate.

    Positions and segments become a linear image of the teacher's, so that those absent from the corpus are not noise. Where no
    norm enters the upper layers, the step is exact, and nothing but the matrix is solved for.
    """
    lower, upper, config = student.lower, student.upper, student.upper.config
    last, width, scale = lower.layers[-1], config.hidden, torch.ones(())
    places = torch.zeros(config.positions, 0)
    if config.has_places:
        table, scale = teacher.positions.weight, teacher.positions.weight.std()
        places = (table - table.mean(0)) / scale
    inner_size = last.ffn_out.in_features
    products, targets, tokens = torch.zeros(()), torch.zeros(()), 0
    for lesson in lessons:
        with _inputs_of(last.ffn_out, last.ffn_norm) as seen:
            vectors = lower(lesson.windows)
        present, _ = lower.packed(lesson.windows)
        reach = torch.sigmoid(lower.gate_bias)[present % lower.window.n]
        inner = seen[0]
        if config.enters_normed:
            # A change of the last matrix's output reaches a window's vector divided by the norm's deviation, times the gate.
            assert last.ffn_norm.eps is not None  # as in every encoder
            reach = reach / (seen[1].var(-1, unbiased=False) + last.ffn_norm.eps).sqrt()
        else:
            inner = seen[1]  # behind its norm
        reached = lower.spread(inner * reach.unsqueeze(-1), present, lesson.windows)[:, lower.window.stored]
        features = lower.window.aggregate(reached.index_select(0, lesson.window_of))
        sums = _placed(upper, lower.window.aggregate(vectors.index_select(0, lesson.window_of)), lesson)
        if config.enters_normed:
            wanted = (lesson.at_split - upper.norm.bias) * _inverse(upper.norm.weight)
            deviation = sums.std(-1, unbiased=False, keepdim=True)
            residual = (wanted - F.layer_norm(sums, sums.shape[-1:])) * deviation
            x = torch.cat([features, places.to(features)[lesson.positions], torch.ones_like(deviation)], dim=1)
        else:
            residual, x = lesson.at_split - sums, features
        products, targets, tokens = products + x.T @ x, targets + x.T @ residual, tokens + len(x)
    ridge = products.diagonal().clone()
    ridge[:inner_size] = RIDGE * inner_size * ridge[:inner_size].mean() / tokens
    ridge[inner_size:] = RIDGE_POSITIONS * width
    solved = torch.linalg.solve((products + ridge.diag()).double(), targets.double()).to(products.dtype)
    if not config.enters_normed:
        last.ffn_out.weight += solved.T
        return
    matrix, place_map, offset = solved.split([inner_size, places.shape[1], 1])
    last.ffn_out.weight += (matrix * _inverse(last.ffn_norm.weight)).T
    if not config.has_places:
        upper.segments.weight += offset
        return
    upper.positions.weight += places @ place_map + offset
    segments = teacher.segments.weight
    upper.segments.weight += (segments - segments[0]) / scale @ place_map


def _placed(upper: UpperStack, sums: Tensor, lesson: Lesson) -> Tensor:
    """Returns sums of texts of one segment as they are before the entering norm."""
    return sums + upper.positions(lesson.positions) if upper.config.has_places else sums


def _fit_norm(student: SplitModel, lessons: Sequence[Lesson]) -> None:
    """Fits the scale and shift of the entering norm, each dimension by itself."""
    upper = student.upper
    pairs = []
    for lesson in lessons:
        sums = _placed(upper, student.sums(lesson), lesson) + upper.segments.weight[0]
        pairs.append((F.layer_norm(sums, sums.shape[-1:], eps=upper.norm.eps), lesson.at_split))
    entered, wanted = (torch.cat(side) for side in zip(*pairs, strict=True))
    mean, wanted_mean = entered.mean(0), wanted.mean(0)
    entered = entered - mean
    slope = (entered * (wanted - wanted_mean)).sum(0) / entered.square().sum(0)
    upper.norm.weight.copy_(slope)
    upper.norm.bias.copy_(wanted_mean - slope * mean)


def _inverse(weight: Tensor) -> Tensor:
    return weight / (weight.square() + (DAMPING * weight.abs().median()).square())


@contextmanager
def _inputs_of(*modules: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    hooks = [module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
