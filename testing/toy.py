"""A toy encoder with three domains, two tasks and tenants of different ranks and heads, and a toy decoder.

Each is built in a second. They are varied enough to reveal answers of a wrong tenant, slot or table.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from hplm.model.config import RMS, SCALED, UNUSED, BackboneConfig
from hplm.model.windows import Window
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state_folder import EXPORTED_TENANTS
from testing.random_store import TOY as CONFIG
from testing.random_store import random_exits, random_store, random_students, words

CHATML = (
    "{% for message in messages %}<|258|>{{ message['role'] }}\n{{ message['content'] }}<|257|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|258|>assistant\n{% endif %}"
)
ROTARY = replace(  # a toy encoder as ModernBERT: of its layers only the last one sees more than near tokens
    CONFIG, segments=0, norm=SCALED, pre_norm=True, biases=False, gated=True, rotary_base=160_000.0, near=4, global_every=3,
    near_base=10_000.0,
)  # fmt: skip
CHAT = BackboneConfig(  # a toy decoder
    "chat", 264, 32, 4, 48, 2, 2, 256, 0, "silu", 1e-5, UNUSED, UNUSED, UNUSED, UNUSED, Window(3, causal=True),
    kv_heads=2, head=12, norm=RMS, pre_norm=True, biases=False, gated=True, rotary_base=10_000.0, start_id=256, end_ids=(257,),
    chat_template=CHATML,
)  # fmt: skip
CHAT_OPTIONS = ServingOptions(dtype="fp32", max_sequences=4, cache_tokens=32_768, admission=False)
DOMAINS = ("bio", "law")
BOTH = ("attention_out", "ffn_out")
TENANTS = [
    TenantVersion("acme", 1, "bio", 1, "classify", ["red", "grün", "blue"], 8),
    TenantVersion("beta", 1, "root", 1, "tag", ["O", "PART"], 4),
    TenantVersion("city", 1, "law", 1, "classify", [f"topic-{i}" for i in range(20)], 8),
    TenantVersion("dune", 1, "bio", 1, "tag", ["O", "A", "B"], 8),
    TenantVersion("echo", 1, "root", 1, "classify", ["no", "yes"], 0),  # only a head
    TenantVersion("flux", 1, "law", 1, "classify", ["low", "high"], 4, "lora", head_function="tanh"),
    TenantVersion("gaia", 1, "bio", 1, "tag", ["O", "A"], 2, "lora", ("query", "key", "attention_out", "ffn_in", "ffn_out")),
    TenantVersion("hugo", 1, "root", 1, "classify", ["a", "b", "c"], 4, "bottleneck", BOTH, "gelu", dtype="bf16"),
]
WITH_STUDENTS = TenantVersion("iris", 1, "law", 1, "classify", ["one", "two", "three"], 4, "lora")
SERVED = [*TENANTS, WITH_STUDENTS]
WITH_EXITS = ("city", "dune", "flux")
WORDS = words(CONFIG.vocabulary)


@dataclass(frozen=True)
class Toy:
    store: Store
    repository: Path

    @property
    def folder(self) -> Path:
        return self.repository / self.store.config.name / "1"


def make_toy(folder: Path, config: BackboneConfig = CONFIG) -> Toy:
    # Weights are far larger than BERT's, so that confused neighbours, slots or tables change the answers.
    store = random_store(folder / "store", config, SERVED, DOMAINS, spread=0.3)
    for number, tenant in enumerate(TENANTS):
        if tenant.id in WITH_EXITS:
            random_exits(store, tenant, number % config.upper_layers, plans=1)  # the governor would change their answers
    random_students(store, WITH_STUDENTS)
    export(store, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    return Toy(store, folder / "repository")


def make_decoder(
    folder: Path, tenants: Sequence[TenantVersion], domains: Sequence[str], config: BackboneConfig = CHAT
) -> Store:
    """Makes the store of a decoder with random weights, so large that attention and adapters change the answers."""
    store = random_store(folder, config, tenants, domains, corpus_tokens=500, spread=0.3)
    upper = store.upper()
    for weight in upper.parameters():
        weight.data *= 15 if weight.ndim > 1 else 1
    store.save_upper(upper)
    return store


def make_chat(
    folder: Path,
    tenants: Sequence[TenantVersion],
    domains: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    options: ServingOptions = CHAT_OPTIONS,
) -> Toy:
    """Makes a decoder for answers of up to 16,384 tokens, which take some seconds.

    `settings`: keys and limits of tenants, as in a snapshot.
    """
    config = replace(CHAT, positions=16_384)
    store = make_decoder(folder / "store", tenants, domains, config)
    export(store, folder / "repository", options)
    path = folder / "repository" / config.name / "1" / EXPORTED_TENANTS
    exported = Snapshot.load(path)
    changed = [replace(tenant, **settings.get(tenant.id, {})) for tenant in exported.tenants]
    Snapshot(0, exported.branches, changed, exported.export).save(path)
    return Toy(store, folder / "repository")


def random_text(rng: random.Random, longest: int = 60) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))
