"""HMI's compressed baselines (Table 3): a BERT of fewer layers that a tenant's dedicated BERT teaches.

`distil` learns labels and the teacher's answers, as DistilBERT does. `tiny-half` and `tiny-third` first learn the teacher's
hidden states, as TinyBERT does, but not its attention scores. A student starts from evenly chosen layers of its teacher, and
reads no text but the tenant's.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.learning.bodies import WholeBody
from builder.learning.distil import WAY_OUT
from builder.learning.limits import Budget
from builder.learning.loop import Exam, Group, Training, train
from builder.training.data import Data
from builder.training.finetuning import Trained, TrainingOptions, finetune, logits_of
from research.schemes.pretrained import evenly


def distilled(body: WholeBody, data: Data, options: TrainingOptions, kept: float, states: bool) -> Trained:
    """Trains a dedicated BERT and then its student with this share of the layers, each with the same options.

    `states`: the student first learns the teacher's hidden states, for as many passes over the texts.
    """
    teacher = finetune(body, data, options)
    assert isinstance(teacher.body, WholeBody)
    layers = len(teacher.body.layers)
    student = teacher.body.with_layers(evenly(layers, max(1, round(kept * layers))))
    if states:
        learn_states(student, teacher.body, data, options)

    taught = logits_of(teacher.body, teacher.model, data, data.train)

    def apart(chosen: np.ndarray, logits: Tensor) -> Tensor:
        """Returns the mean squared distance from the teacher's logits. It is the same loss for every task."""
        wanted = torch.from_numpy(np.concatenate([taught[i] for i in chosen])).to(logits.device)
        return F.mse_loss(logits.float(), wanted)

    return finetune(student, data, options, further=apart)


def learn_states(student: WholeBody, teacher: WholeBody, data: Data, options: TrainingOptions) -> None:
    """Moves each of the student's hidden states towards that of the teacher's layers which it replaces."""
    layers = len(teacher.layers)
    teacher = teacher.with_layers(range(layers))  # whose states are told after each layer
    ends = [0, *(round((i + 1) * layers / len(student.layers)) for i in range(len(student.layers)))]
    chosen = list(chain.from_iterable(data.batches(options.epochs, options.batch_texts, options.seed)))

    def loss_of(some: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, some, data.device, False)
        with torch.no_grad():
            wanted = teacher.states(pack, None)
        pairs = zip(student.states(pack, None), ends, strict=True)
        apart = [F.mse_loss(own.float(), wanted[end].float()) for own, end in pairs]
        return torch.stack(apart).sum(), len(pack.tokens)

    learned = Group(options.body_rate, {str(number): parameter for number, parameter in enumerate(student.parameters())})
    training = Training(
        "learning the teacher's states", data.device, [learned], lambda number: iter(chosen[number:]), loss_of,
        lambda: Exam(0.0, 0.0), WAY_OUT,
    )  # fmt: skip
    train(training, Budget(steps=len(chosen)))
