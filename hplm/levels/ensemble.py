"""The weighted ensemble: joins the answer of a level with what the levels before it have answered (Tabi, Eq. 6).

s = w * now + (1 - w) * before, over probabilities. Each function takes and returns logits, in which a weight of 1 changes
nothing. `weight` is one number, or one for each row where every row is a text. Results can be joined again.
"""

from __future__ import annotations

import numpy as np

from hplm.arrays import Array
from hplm.levels.evidence import log_softmax


def of_classes(before: Array, now: Array, weight: Array | float) -> Array:
    """Joins choices between classes, one in each row. Returns log probabilities, or `now` where the weight is 1."""
    return _unless_whole(now, weight, _mixed(log_softmax(before), log_softmax(now), _of_rows(weight)))


def of_labels(before: Array, now: Array, weight: Array | float) -> Array:
    """Joins labels that hold or do not, each for itself. Returns a logit for each."""
    of_rows = _of_rows(weight)
    holds = _mixed(_log_sigmoid(before), _log_sigmoid(now), of_rows)
    holds_not = _mixed(_log_sigmoid(-before), _log_sigmoid(-now), of_rows)
    return _unless_whole(now, weight, holds - holds_not)


def of_numbers(before: Array, now: Array, weight: Array | float) -> Array:
    """Returns the weighted mean."""
    of_rows = _of_rows(weight)
    return _unless_whole(now, weight, of_rows * now.astype(np.float64) + (1 - of_rows) * before)


def of_ends(before: Array, now: Array, weight: float, heads: Array) -> Array:
    """Joins where an answer starts and where it ends, which are choices between the rows of one text, and a third column.

    `heads` are the rows that stand for a whole window. Their third column is the score of no answer: the lowest one counts,
    half of it competes with the starts, and half with the ends. All heads get the joined score.
    """
    if weight == 1:
        return now
    joined = _mixed(_log_ends(before, heads), _log_ends(now, heads), np.array(weight))
    result = np.zeros(now.shape, dtype=now.dtype)
    tokens = np.delete(np.arange(len(now)), heads)
    result[tokens, :2] = joined[: len(tokens)]
    if now.shape[1] > 2:
        result[heads, 2] = joined[-1].sum()
    return result


def _log_ends(logits: Array, heads: Array) -> Array:
    """Returns log probabilities of starts and ends, tokens x 2; behind them those of no answer, if it has a score."""
    ends = np.delete(logits[:, :2], heads, axis=0)
    if logits.shape[1] > 2:
        ends = np.append(ends, np.full((1, 2), logits[heads, 2].min() / 2), axis=0)
    return log_softmax(ends.T).T


def _mixed(before: Array, now: Array, weight: Array) -> Array:
    """Returns the logarithm of a weighted mean of probabilities, from theirs. It is finite: small ones do not become 0."""
    with np.errstate(divide="ignore"):  # a weight of 0 or 1
        return np.logaddexp(np.log(weight) + now, np.log(1 - weight) + before)


def _of_rows(weight: Array | float) -> Array:
    """Returns the weight in a form that fits rows x columns."""
    return np.asarray(weight, dtype=np.float64).reshape(-1, 1)


def _unless_whole(now: Array, weight: Array | float, joined: Array) -> Array:
    return np.where(_of_rows(weight) == 1, now, joined.astype(now.dtype))


def _log_sigmoid(logits: Array) -> Array:
    return -np.logaddexp(0, -logits.astype(np.float64))
