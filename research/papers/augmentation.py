"""Makes more texts for students: copies of the training's texts, in which a masked head guesses some words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from builder.learning.bodies import PlotBody
from builder.learning.masked import MaskedHead, masked
from builder.packed_batches import packed_batches
from builder.store.store import Store
from builder.tasks.lookup import Text
from builder.training.data import Data
from hplm.model.tensors import sent

GUESSES = 15  # the most likely words for a place, of which one is drawn


@torch.no_grad()
def augmented(body: PlotBody, data: Data, seed: int) -> list[Text]:
    """Returns a copy of each training text without its labels; none where no branch of the domain has a masked head."""
    if (guesser := _guesser(data.reader.store, data.reader.branch)) is None:
        return []
    (head, words), chance, found = guesser, np.random.default_rng(seed), list[Text]()
    head, words = head.to(data.device), words.to(data.device)
    for chosen in packed_batches(data.train.lengths):
        own = [data.train.texts[number] for number in chosen]
        seen, places = zip(*(masked(text.tokens, data.config, chance) for text in own), strict=True)
        hidden = replace(data.train, texts=list(map(data.reader.with_tokens, own, seen)))
        starts = np.cumsum(hidden.lengths) - hidden.lengths
        asked = np.concatenate([start + part for start, part in zip(starts, places, strict=True)])
        pack = data.reader.pack(hidden, np.arange(len(own)), data.device)
        states = body(replace(pack, reading=sent(asked, data.device)), None)
        guesses = head(states, words).topk(GUESSES).indices.cpu().numpy()
        guessed = guesses[np.arange(len(asked)), chance.integers(GUESSES, size=len(asked))]
        for text, part, new in zip(own, places, np.split(guessed, np.cumsum([*map(len, places)])[:-1]), strict=True):
            tokens = text.tokens.copy()
            tokens[part] = new
            targets = data.task.unlabelled().targets(text.example, text.spans, {})
            found.append(replace(data.reader.with_tokens(text, tokens), targets=targets))
    return found


def _guesser(store: Store, branch: tuple[str, int]) -> tuple[MaskedHead, Tensor] | None:
    """Returns the masked head of the nearest branch that has one, and the vectors of its words."""
    for step in store.chain(*branch):
        if (weights := store.masked_head(*step)) is not None:
            head = MaskedHead(store.config)
            head.load_state_dict(weights)
            return head.eval(), store.lower(*step).words.weight
    return None
