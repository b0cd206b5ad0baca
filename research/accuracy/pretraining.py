"""Further pretraining of a whole BERT: of its lower layers, its upper layers or all (HMI's observation O1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.hardware import step_tokens
from builder.learning.bodies import WholeBody
from builder.learning.distil import WAY_OUT
from builder.learning.limits import Budget
from builder.learning.loop import Exam, Group, Training, train
from builder.learning.masked import HEAD_RATE, HEAD_SHARE, LEARNING_RATE, MaskedHead, given_head, masked
from builder.learning.windows import Reading, TextPack, index_of
from builder.packed_batches import positions_of
from builder.store.resumable import Savepoint, replaced
from builder.store.store import Store
from builder.tables.build_folder import held
from builder.tables.corpus import tokenize_corpus
from builder.tasks.lookup import Pack


def pretrained_body(store: Store, part: str, minutes: float, corpus: Path, folder: Path, device: torch.device) -> WholeBody:
    """Returns the store's original BERT, of which these layers have read the corpus. `folder` keeps it, for the next call."""
    body, kept = WholeBody.of(store), folder / "body.pt"
    if not kept.exists():
        with held(folder, f"the further pretrained {folder.name}"):
            documents = list(tokenize_corpus([corpus], store.tokenizer(), folder / "corpus"))
            _pretrain(body, store, documents, part, Budget(minutes=minutes), device, folder / "learning.pt")
            with replaced(kept) as temporary:
                torch.save(body.state_dict(), temporary)
    body.load_state_dict(torch.load(kept, weights_only=True, map_location="cpu"))
    return body


def _pretrain(
    body: WholeBody, store: Store, documents: Sequence[np.ndarray], part: str, budget: Budget, device: torch.device, saved: Path
) -> None:
    """Changes `body` in place. Fits a head first if the model has none. The same call continues an interrupted one."""
    config, given = store.config, given_head(store.model, store.config)
    head, reading = given or MaskedHead(config), Reading(config, documents, 0, step_tokens(device))
    for module in (body, head):
        module.to(device).eval()

    def loss_of(read: TextPack) -> tuple[Tensor, int]:
        texts, chance = read
        words, lengths = np.concatenate(texts), np.array([len(text) for text in texts])
        seen, guessed = masked(words, config, chance)
        positions, wanted = index_of(positions_of(lengths), device), index_of(words[guessed], device)
        pack = Pack(
            sums=None, tokens=index_of(seen, device), positions=positions, segments=torch.zeros_like(positions),
            lengths=lengths.tolist(), reading=index_of(guessed, device), rows_of=[len(guessed)], targets=wanted,
        )  # fmt: skip
        return F.cross_entropy(head(body(pack, None), body.words.weight).float(), wanted), len(words)

    def learn(title: str, group: Group, part: Budget, savepoint: Path) -> None:
        """The last weights are kept: nothing scores them."""
        for module in (body, head):
            module.requires_grad_(False)
        training = Training(title, device, [group], reading.starting, loss_of, lambda: Exam(0.0, 0.0), WAY_OUT)
        train(training, part, Savepoint(savepoint))

    if given is None:
        fitted = Group(HEAD_RATE, {f"head.{name}": parameter for name, parameter in head.named_parameters()})
        learn("fitting a head", fitted, budget.part(HEAD_SHARE), saved.with_name(f"{saved.stem}-head{saved.suffix}"))
        budget = budget.part(1 - HEAD_SHARE)
    learned = Group(LEARNING_RATE, {str(number): parameter for number, parameter in enumerate(body.part(part))})
    learn(f"pretraining, {part}", learned, budget, saved)
