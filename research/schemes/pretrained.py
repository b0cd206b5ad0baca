"""The whole pretrained model that a store was made from, and `shared` and `adapter`: stores whose layers are all upper ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from builder.store.store import Store, TenantFile
from hplm.errors import InvalidInput
from hplm.model.checkpoint import full_stack, load_checkpoint, random_backbone
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.windows import Window
from hplm.plot.writing import write_table
from testing.random_store import RANDOM

UNIGRAMS = Window(1)


@dataclass(frozen=True)
class Pretrained:
    """A whole model as a backbone without lower layers: its lower half only gives each token its word's vector."""

    config: BackboneConfig
    lower: LowerStack
    upper: UpperStack

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of `research.baselines.body.Body`."""
        upper = {f"upper.{name}": tensor for name, tensor in self.upper.state_dict().items()}
        return upper | {"words.weight": self.lower.words.weight}

    def shorter(self, layers: int) -> Pretrained:
        """Returns a model of evenly chosen layers, the usual start of a distilled student (DistilBERT)."""
        chosen = evenly(self.config.upper_layers, layers)
        config = replace(self.config, upper_layers=layers)
        upper = UpperStack(config)
        weights = {name: tensor for name, tensor in self.upper.state_dict().items() if not name.startswith("layers.")}
        upper.load_state_dict(weights, strict=False)
        for layer, source in zip(upper.layers, chosen, strict=True):
            layer.load_state_dict(self.upper.layers[source].state_dict())
        return Pretrained(config, self.lower, upper)


def evenly(total: int, count: int) -> list[int]:
    """Returns `count` of `total` layers, evenly chosen."""
    return [round((i + 0.5) * total / count - 0.5) for i in range(count)]


def pretrained(store: Store) -> Pretrained:
    split = store.config
    if store.model == RANDOM:
        config = _whole_config(split, split.lower_layers + split.upper_layers)
        return Pretrained(config, *random_backbone(config))
    checkpoint = load_checkpoint(store.model, split.name, split.lower_layers, split.upper_layers)
    if checkpoint.skipbert:
        raise InvalidInput(
            f"{store.model!r} is a SkipBERT. Its lower layers were never trained on whole texts, so there is no whole BERT to "
            "export: use a store that was built from a plain BERT"
        )
    config, weights = _whole_config(split, checkpoint.total_layers), checkpoint.weights
    lower, upper = LowerStack(config), UpperStack(config)
    with torch.no_grad():
        lower.words.weight.copy_(weights["embeddings.word_embeddings.weight"])
        upper.positions.weight.copy_(weights["embeddings.position_embeddings.weight"])
        upper.segments.weight.copy_(weights["embeddings.token_type_embeddings.weight"])
        for part in ("weight", "bias"):
            getattr(upper.norm, part).copy_(weights[f"embeddings.LayerNorm.{part}"])
    upper.layers = full_stack(checkpoint)
    return Pretrained(config, lower, upper)


def _whole_config(split: BackboneConfig, layers: int) -> BackboneConfig:
    return replace(split, lower_layers=0, upper_layers=layers, window=UNIGRAMS, entry_eps=None)


Weights = list[dict[str, torch.Tensor]]


def flat_store(store: Store, folder: Path, whole: Pretrained, with_adapters: bool) -> Store:
    """Makes a store without precomputed layers, which the backends of hPLMs serve.

    All layers are upper layers. Its table has only single tokens, each with the vector of its word.
    """
    tokenizer_json = (store.folder / "tokenizer.json").read_text("utf-8")
    flat = Store.create(folder, store.model, whole.config, tokenizer_json, whole.lower, whole.upper)
    spec = flat.table_spec("root", 1, None, "fp16", corpus_tokens=0)
    words = whole.lower.words.weight.detach()

    def values_of(windows: np.ndarray) -> torch.Tensor:
        return words[torch.from_numpy(windows - 1)]

    write_table(flat.table_folder("root", 1), spec, flat.space.unigrams(), values_of)
    for tenant in store.tenants():
        adapter, head = store.tenant_weights(tenant)
        adapter = _for_all_layers(flat, tenant, adapter) if with_adapters else None
        flat_tenant = replace(tenant, domain="root", domain_version=1, rank=tenant.rank if adapter is not None else 0)
        flat.save_tenant(flat_tenant, adapter, head, {})
    return flat


def _for_all_layers(flat: Store, tenant: TenantFile, trained: Weights | None) -> Weights | None:
    """Returns adapters for all layers: the trained ones in the upper half, and zeros below, which cost as much time."""
    layout = tenant.adapter_layout(flat.config)
    if trained is None or layout is None:
        return None
    zeros = [
        {name: torch.zeros(shape, dtype=layout.torch_dtype) for name, shape in layout.shapes.items()}
        for _ in range(layout.layers - len(trained))
    ]
    return zeros + trained
