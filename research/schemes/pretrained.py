"""The whole pretrained model that a store was made from, and `shared` and `adapter`: stores whose layers are all upper ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from builder.learning.bodies import WholeBody
from builder.store.branches import table_spec
from builder.store.store import Store
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint
from hplm.model.stacks import LowerStack
from hplm.model.windows import Window
from hplm.plot.writing import write_table
from research.baselines.body import Body
from testing.random_store import RANDOM, random_backbone


def pretrained(store: Store) -> Body:
    """Returns the whole model as a backbone without lower layers: its lower half only gives each token its word's vector."""
    split = store.config
    layers = split.lower_layers + split.upper_layers
    whole = replace(split, lower_layers=0, upper_layers=layers, window=Window(1), entry_eps=None)
    if store.model == RANDOM:
        lower, upper = random_backbone(whole)
        weights = {"words.weight": lower.words.weight, **_upper(upper)}
    else:
        checkpoint = load_checkpoint(store.model, split.name, split.lower_layers, split.upper_layers)
        if checkpoint.skipbert:
            raise InvalidInput(
                f"{store.model!r} is a SkipBERT. Its lower layers were never trained on whole texts, so there is no whole BERT "
                "to export: use a store that was built from a plain BERT"
            )
        whole, given = replace(whole, upper_layers=checkpoint.total_layers), WholeBody(checkpoint)
        weights = {"words.weight": given.words.weight, **_upper(given)}
    body = Body(whole)
    body.load_state_dict({name: weights[name] for name in body.state_dict()})
    return body


def _upper(stack: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"upper.{name}": weight for name, weight in stack.state_dict().items()}


def shorter(body: Body, layers: int) -> Body:
    """Returns a model of evenly chosen layers, the usual start of a distilled student (DistilBERT)."""
    found = Body(replace(body.config, upper_layers=layers))
    found.load_state_dict({name: own for name, own in body.state_dict().items() if ".layers." not in name}, strict=False)
    for layer, source in zip(found.upper.layers, evenly(body.config.upper_layers, layers), strict=True):
        layer.load_state_dict(body.upper.layers[source].state_dict())
    return found


def evenly(total: int, count: int) -> list[int]:
    """Returns `count` of `total` layers, evenly chosen."""
    return [round((i + 0.5) * total / count - 0.5) for i in range(count)]


def flat_store(store: Store, folder: Path, whole: Body, with_adapters: bool) -> Store:
    """Makes a store without precomputed layers, which the backends of hPLMs serve.

    All layers are upper layers. Its table has only single tokens, each with the vector of its word. Adapters are the trained
    ones in the upper half, and zeros below, which cost as much time.
    """
    tokenizer_json = (store.folder / "tokenizer.json").read_text("utf-8")
    flat = Store.create(folder, store.model, whole.config, tokenizer_json, LowerStack(whole.config), whole.upper)
    spec, words = table_spec(flat.config, "root", 1, None, "fp16", corpus_tokens=0), whole.words.weight

    def values_of(windows: np.ndarray) -> torch.Tensor:
        return words[torch.from_numpy(windows - 1)]

    write_table(flat.table_folder("root", 1), spec, flat.space.unigrams(), values_of)
    for tenant in store.tenants():
        adapter, head = store.tenant_weights(tenant)
        layout = tenant.adapter_layout(flat.config)
        if not with_adapters or adapter is None or layout is None:
            adapter = layout = None
        else:
            zeros = {name: torch.zeros(shape, dtype=layout.torch_dtype) for name, shape in layout.shapes.items()}
            adapter = [zeros] * (layout.layers - len(adapter)) + adapter
        known = replace(tenant, domain="root", domain_version=1, rank=tenant.rank if adapter else 0)
        flat.save_tenant(known, adapter, head, {})
    return flat
