"""The dispatcher: sends texts whose answers are not sure enough on to the next step of their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hplm.arrays import Array
from hplm.engine.request import InHand, Text
from hplm.errors import HplmError
from hplm.levels.dispatch import reroutes
from hplm.levels.pruning import kept_of_each


@dataclass
class Leaving:
    """Texts that leave a batch, because nothing is computed for them in it any more."""

    texts: list[Text]  # at the last steps of their plans
    logits: list[Array]  # of these, still to be read
    sure: list[tuple[Text, InHand]] = field(default_factory=list)  # with answers that are sure enough
    across: list[tuple[Text, InHand]] = field(default_factory=list)  # to another backbone
    broken: list[tuple[Text, HplmError]] = field(default_factory=list)
    back: list[Text] = field(default_factory=list)  # to the line, to be computed in a later batch

    @property
    def all(self) -> list[Text]:
        return [*self.texts, *self.back, *(text for text, _ in (*self.sure, *self.across, *self.broken))]


def divided(
    read: Sequence[tuple[Text, InHand]], received: Mapping[Text, Array]
) -> tuple[list[tuple[Text, InHand]], list[Text], list[tuple[Text, InHand]]]:
    """Returns the texts that are answered, those that stand at their next step now, with the answer so far in hand, and those
    whose next step is in another backbone, with answers that say what it is to read.

    `received`: how much attention the tokens of texts have received. Of these, some words are not read at the next step.
    """
    if not read:
        return [], [], []
    steps = [text.request.plan.steps[text.step] for text, _ in read]
    goes_on = reroutes(
        np.array([found.answer.confidence for _, found in read]),
        np.array([step.cutoff for step in steps]),
        np.array([step.slope for step in steps]),
        np.array([text.draw for text, _ in read]),
    ).tolist()
    answered = [one for one, goes in zip(read, goes_on, strict=True) if not goes]
    unsure = [one for one, goes in zip(read, goes_on, strict=True) if goes]
    kept = _kept([text for text, _ in unsure if text in received], received)
    leaving = [one for one in unsure if one[0].leaves_next]
    going_on = [one for one in unsure if not one[0].leaves_next]
    for text, found in going_on:
        text.go_on(found, kept.get(text))
    return answered, [text for text, _ in going_on], [_given_back(*one, kept.get(one[0])) for one in leaving]


def _given_back(text: Text, found: InHand, kept: Array | None) -> tuple[Text, InHand]:
    return text, found._replace(answer=replace(found.answer, onward=text.onward(kept)))


def _kept(texts: Sequence[Text], received: Mapping[Text, Array]) -> dict[Text, Array]:
    """Returns for each text which of its tokens the next step reads."""
    words = [text.words for text in texts if text.words is not None]
    if not words:
        return {}
    lengths = np.array([len(own) for own in words])
    alphas = np.array([text.request.plan.steps[text.step].alpha for text in texts])
    importance = np.concatenate([received[text] for text in texts])
    kept = kept_of_each(importance, np.concatenate(words), alphas, lengths)
    return dict(zip(texts, np.split(kept, np.cumsum(lengths)[:-1]), strict=True))
