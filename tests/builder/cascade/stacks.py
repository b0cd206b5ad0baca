"""Shorter stacks for tests: the first layers of a store's full one, which have learned nothing."""

from dataclasses import replace

from builder.store.levels import stack_file
from hplm.model.stacks import UpperStack
from hplm.model.weights import save_weights


def add_stack(store, name, layers):
    upper = UpperStack(replace(store.config, upper_layers=layers))
    weights = store.upper().state_dict()
    path = stack_file(store, name)
    path.parent.mkdir(exist_ok=True)
    save_weights({part: weights[part] for part in upper.state_dict()}, path)
