"""Documents whose words can be guessed, and comparisons of weights."""

import torch

from testing.random_store import random_documents
from tests.builder.checkpoints import VOCABULARY


def chained(config, tokens, length, seed):
    """Each word determines the next one, so that masked words can be predicted."""
    documents = random_documents(config, tokens, length, seed)
    for document in documents:
        for place in range(2, length - 1):
            document[place] = 5 + (document[place - 1] * 7 + 3) % (VOCABULARY - 5)
    return documents


def weights(*stacks):
    return {f"{i}.{name}": tensor.clone() for i, stack in enumerate(stacks) for name, tensor in stack.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
