"""Further pretraining: a domain's lower layers learn to guess masked words of its corpus (HMI 5.1, observation O1).

Masked texts go through windows as served texts do. The upper layers and the guessing head do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builder.learning.distil import WAY_OUT, lower_groups, split_documents
from builder.learning.limits import Budget
from builder.learning.loop import ParameterGroup, Training, train
from builder.learning.progress import Exam, Progress
from builder.learning.windows import Shrinking, SplitModel, TextPack, Windowed, in_packs, index_of, reading
from hplm.model.config import BackboneConfig
from hplm.model.families import WEIGHT_AND_BIAS
from hplm.model.layer import activation
from hplm.model.original import silent_transformers, weights_of
from hplm.model.stacks import LowerStack, UpperStack

MASKED = 0.15  # of the words are guessed. Of these,
AS_MASK, AS_RANDOM = 0.8, 0.1  # such shares are hidden or replaced; the rest stay as they are
HEAD_SHARE = 0.2  # of the budget, to train a head where there is none
HEAD_RATE = 1e-3
LEARNING_RATE = 1e-4  # of the lower layers, which are trained already
EXAMS = 5  # tests on held-out texts; the best state is kept
# Where a family's models have the projection, the norm and the bias of their head. Those of ELECTRA and EuroBERT have none.
HEADS = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    "modernbert": ("head.dense", "head.norm", "decoder.bias"),
    "nomic_bert": tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.layer_norm", "bias")),
    **dict.fromkeys(("camembert", "roberta", "xlm-roberta"), ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")),
}


class MaskedHead(nn.Module):
    """BERT's head: a projection, a norm, and the word vectors with a bias for each."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.activation = activation(config.activation)
        with torch.no_grad():  # starts from the upper layers' own output, until it is fitted
            self.dense.weight.copy_(torch.eye(config.hidden))
            self.dense.bias.zero_()

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden))) @ words.T + self.bias


@dataclass(frozen=True)
class MaskedLesson(Windowed):
    guessed: Tensor  # the indices of the tokens to guess
    words: Tensor  # the original words there


def given_head(model: str, config: BackboneConfig) -> MaskedHead | None:
    """Returns the head of the original checkpoint; None if it was saved without one."""
    found, report = weights_of(model, silent_transformers().AutoModelForMaskedLM)
    names = HEADS.get(found.config.model_type)
    if names is None or any(name.startswith(names) for name in report["missing_keys"]):
        return None
    (dense, norm, bias), head, weights = names, MaskedHead(config), found.state_dict()
    own = {
        f"{part}.{kind}": weights[f"{name}.{kind}"]
        for part, name in (("dense", dense), ("norm", norm))
        for kind in WEIGHT_AND_BIAS
        if f"{name}.{kind}" in weights
    }
    head.load_state_dict(own | ({"bias": weights[bias]} if bias in weights else {}), strict=False)  # others are zeros
    return head


def masked(words: np.ndarray, config: BackboneConfig, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens with some masked, and which are to be guessed: at least one."""
    special = np.isin(words, (config.cls_id, config.sep_id))
    guessed = np.flatnonzero(~special & (chance.random(len(words)) < MASKED))
    if not len(guessed):
        guessed = np.flatnonzero(~special)[:1]
    fate, seen = chance.random(len(guessed)), words.copy()
    seen[guessed[fate < AS_MASK]] = config.mask_id
    replaced = guessed[(fate >= AS_MASK) & (fate < AS_MASK + AS_RANDOM)]
    seen[replaced] = chance.integers(config.vocabulary, size=len(replaced))
    return seen, guessed


def masked_lesson(windows: Shrinking, texts: list[np.ndarray], chance: np.random.Generator) -> MaskedLesson:
    words = np.concatenate(texts)
    seen, guessed = masked(words, windows.config, chance)
    packed = windows(seen, np.array([len(text) for text in texts]), chance)
    chosen, wanted = index_of(guessed, windows.device), index_of(words[guessed], windows.device)
    return MaskedLesson(**vars(packed), guessed=chosen, words=wanted)


def further_pretrain(
    config: BackboneConfig, lower: LowerStack, upper: UpperStack, head: MaskedHead | None, head_is: str,
    documents: Sequence[np.ndarray], budget: Budget, seed: int, device: torch.device, saved: Path | None = None,
) -> tuple[MaskedHead, dict[str, Any]]:  # fmt: skip
    """Changes `lower` in place, and returns the head and the report. Trains a head first if there is none.

    `head_is`: where the head comes from. The same call after an interruption continues.
    """
    held_out, training = split_documents(documents, seed)
    windows, batches = Shrinking(config, device), partial(reading, config, training, seed, device)
    held = [
        masked_lesson(windows, texts, np.random.default_rng([seed, number])) for number, texts in enumerate(in_packs(held_out))
    ]
    student, own = SplitModel(lower, upper).to(device), (head or MaskedHead(config)).to(device)

    def guesses_of(lesson: MaskedLesson) -> Tensor:
        _, hidden = student(lesson)
        return own(hidden.index_select(0, lesson.guessed), lower.words.weight).float()

    def loss_of(texts: TextPack) -> tuple[Tensor, int]:
        lesson = masked_lesson(windows, *texts)
        return F.cross_entropy(guesses_of(lesson), lesson.words), lesson.tokens

    @torch.no_grad()
    def examined() -> Exam:
        """Returns the mean loss of the guesses on held-out texts, and the share that is right."""
        loss = right = total = 0.0
        for lesson in held:
            guesses = guesses_of(lesson)
            loss += float(F.cross_entropy(guesses, lesson.words, reduction="sum"))
            right += int((guesses.argmax(1) == lesson.words).sum())
            total += len(lesson.words)
        return Exam(-round(loss / total, 4), round(loss / total, 4), facts={"right": round(right / total, 4)})

    def learned(title: str, groups: Sequence[ParameterGroup], part: Budget, file: Path | None, exams: int) -> Progress:
        for module in (student, own):
            module.requires_grad_(False)
        return train(Training(title, device, groups, batches, loss_of, examined, WAY_OUT, exams=exams), part, file)

    fitted, main = Progress(), budget
    if head is None:
        file = saved.with_name(f"{saved.stem}-head{saved.suffix}") if saved is not None else None
        whole = ParameterGroup(HEAD_RATE, dict(own.named_parameters("head")))
        fitted, main = learned("fitting a head", [whole], budget.part(HEAD_SHARE), file, 1), budget.part(1 - HEAD_SHARE)
    now = learned("pretraining", lower_groups(lower, LEARNING_RATE), main, saved, EXAMS)
    for module in (student, own):
        module.requires_grad_(True)
    return own, {
        "documents": len(documents),
        "head": head_is if head is not None else "made here",
        "head_steps": fitted.steps,
        "seed": seed,
        "tokens": now.units,
        **now.reported(),
        "seconds": round(fitted.seconds + now.seconds, 1),
    }
