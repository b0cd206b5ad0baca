"""Shorter stacks for tests: the first layers of a store's full one, which have learned nothing."""

from dataclasses import replace

from hplm.model.stacks import UpperStack


def add_stack(store, name, layers):
    stack, weights = UpperStack(replace(store.config, upper_layers=layers)), store.upper().state_dict()
    stack.load_state_dict({part: weights[part] for part in stack.state_dict()})
    store.save_stack(name, stack, {})
