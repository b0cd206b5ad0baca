"""Decoders as they are served: models for `World`."""

from __future__ import annotations

from pathlib import Path

import torch

from builder.publish.export import write_version
from builder.store.store import TenantVersion
from hplm.engine.backbone import Backbone
from hplm.generation.request import PinnedTenant
from hplm.generation.staging import Decoder, DecoderStager
from testing.toy import make_decoder
from tests.support.device import DEVICE
from tests.support.generative import GenerativeReference

TENANTS = [
    TenantVersion("plain", 1, "root", 1, "generate", [], 0),
    TenantVersion("law", 1, "law", 1, "generate", [], 0),
    TenantVersion("lora", 1, "root", 1, "generate", [], 4, "lora", ("query", "value")),
    TenantVersion("other", 1, "law", 1, "generate", [], 4, "lora", ("key", "attention_out", "ffn_in", "ffn_out", "ffn_gate")),
    TenantVersion("alike", 1, "law", 1, "generate", [], 4, "lora", ("query", "value")),  # as `lora`
]


def written(folder: Path, tenants: list[TenantVersion]) -> Path:
    store = make_decoder(folder / "store", tenants, ["law"])
    write_version(store, store.tenants(), folder / "repository" / "chat" / "1")
    return folder / "repository" / "chat" / "1"


class Served:
    """A decoder as it is served: a model for `World`."""

    def __init__(self, version: Path, tenants: list[str]) -> None:
        self.backbone = backbone = Backbone(version)
        self.config, self.layouts, self.view = backbone.config, backbone.layouts, backbone.view
        self.forest = self.view.forest
        known = [self.view.snapshot.find(id) for id in tenants]
        self.pinned = [PinnedTenant(t.id, t.uid, t.version, self.forest.chain(t.domain, 1), t.adapter) for t in known]
        self._reference = GenerativeReference(backbone)

    @property
    def records(self):
        return self.backbone.records

    def lower(self, table):
        return self.backbone.lower(table)

    def machine(self, world, cache, max_sequences):
        return DecoderStager(self, cache, max_sequences), Decoder(self.backbone.upper(), DEVICE, torch.float32)

    def all_logits(self, ids, source) -> torch.Tensor:
        """Returns the logits of the token behind each token."""
        return self._reference.logits(ids, source.id)


class Small(Served):
    """A toy decoder with tenants of two domains and with adapters."""

    def __init__(self, folder: Path) -> None:
        super().__init__(written(folder, TENANTS), [tenant.id for tenant in TENANTS])
