"""A toy backbone: three domains, two tasks, and tenants of different ranks and heads. It is built in a second.

It is varied enough to reveal answers of a wrong tenant, slot or table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantFile
from hplm.model.config import BackboneConfig
from testing.random_store import random_store, words

CONFIG = BackboneConfig("toy", 200, 32, 4, 64, 2, 2, 64, 2, "gelu", 1e-12, cls_id=2, sep_id=3, unk_id=1, mask_id=4)
DOMAINS = ("bio", "law")
BOTH = ("attention_out", "ffn_out")
TENANTS = [
    TenantFile("acme", 1, "bio", 1, "classify", ["red", "grün", "blue"], 8),
    TenantFile("beta", 1, "root", 1, "tag", ["O", "PART"], 4),
    TenantFile("city", 1, "law", 1, "classify", [f"topic-{i}" for i in range(20)], 8),
    TenantFile("dune", 1, "bio", 1, "tag", ["O", "A", "B"], 8),
    TenantFile("echo", 1, "root", 1, "classify", ["no", "yes"], 0),  # only a head
    TenantFile("flux", 1, "law", 1, "classify", ["low", "high"], 4, "lora", head_function="tanh"),
    TenantFile("gaia", 1, "bio", 1, "tag", ["O", "A"], 2, "lora", ("query", "key", "attention_out", "ffn_in", "ffn_out")),
    TenantFile("hugo", 1, "root", 1, "classify", ["a", "b", "c"], 4, "bottleneck", BOTH, "gelu", dtype="bf16"),
]
WORDS = words(CONFIG.vocabulary)


@dataclass(frozen=True)
class Toy:
    store: Store
    repository: Path

    @property
    def folder(self) -> Path:
        return self.repository / "toy" / "1"


def make_toy(folder: Path, config: BackboneConfig = CONFIG, dtype: str = "fp16") -> Toy:
    # Weights are far larger than BERT's, so that confused neighbours, slots or tables change the answers.
    store = random_store(folder / "store", config, TENANTS, DOMAINS, spread=0.3, dtype=dtype)
    export(store, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    return Toy(store, folder / "repository")


def random_text(rng: random.Random, longest: int = 60) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))
