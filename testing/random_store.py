"""Stores with random weights, exits and a made-up vocabulary, for benchmarks and tests to which only the shapes matter."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from builder.store.branches import table_spec
from builder.store.store import Store, TenantVersion
from builder.store.version import Weights
from builder.tables.ranking import SHORTER_IN_ROOT
from hplm.adapters.layout import Layout, adapter_layout, every_place, exit_layout, head_layout
from hplm.calibration import Calibration
from hplm.model.config import SCALED, BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.windows import ABSENT
from hplm.plot.keys import KeySpace, first_of_each, order
from hplm.plot.meta import TableSpec
from hplm.plot.writing import write_table
from hplm.tenants.exits import Exits, Plan
from hplm.tenants.knowledge import ExitKnowledge, StudentKnowledge, TenantKnowledge
from hplm.tenants.students import Students, Team

RANDOM = "random weights"  # in place of a model's name
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

MINILM = BackboneConfig("minilm", 30522, 384, 12, 1536, 3, 3, 512, 2, "gelu", 1e-12, 2, 3, 1, 4)
BERT_BASE = BackboneConfig("bert-base", 30522, 768, 12, 3072, 6, 6, 512, 2, "gelu", 1e-12, 2, 3, 1, 4)
MODERNBERT = BackboneConfig(
    "modernbert-base", 50368, 768, 12, 1152, 11, 11, 8192, 0, "gelu", 1e-5, 2, 3, 1, 4, norm=SCALED, pre_norm=True,
    biases=False, gated=True, rotary_base=160_000.0, near=64, global_every=3, near_base=10_000.0,
)  # fmt: skip
TOY = BackboneConfig("toy", 200, 32, 2, 64, 2, 2, 64, 2, "gelu", 1e-12, cls_id=2, sep_id=3, unk_id=1, mask_id=4)
SIZES = {config.name: config for config in (MINILM, BERT_BASE, MODERNBERT, TOY)}


def bert_config(config: BackboneConfig) -> Any:
    """Returns the `BertConfig` of a whole backbone."""
    from transformers import BertConfig  # takes a second, and most users of this file do not need it

    return BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=config.lower_layers + config.upper_layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.positions,
    )


def modernbert_config(config: BackboneConfig) -> Any:
    """Returns the `ModernBertConfig` of a whole backbone with near layers."""
    from transformers import ModernBertConfig

    assert config.near is not None
    layers = range(config.lower_layers + config.upper_layers)
    return ModernBertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=len(layers),
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.positions,
        local_attention=2 * config.near,
        layer_types=["full_attention" if config.near_in(layer) is None else "sliding_attention" for layer in layers],
        pad_token_id=0,
    )


def word(number: int) -> str:
    """Returns the text of a token: `w` and lower-case letters, so that every tokenizer keeps it as one word."""
    front, last = divmod(number, 26)
    return (word(front) if front else "w") + chr(ord("a") + last)


def words(vocabulary: int) -> list[str]:
    """Returns the words of a vocabulary. The last one is not ASCII: a tokenizer must read it even if the locale is ASCII."""
    return [*(word(i) for i in range(vocabulary - len(SPECIAL) - 1)), "水"]


def tokenizer_json(vocabulary: int) -> str:
    """Returns a lower-casing tokenizer with one token for each word, and special tokens as in BERT."""
    entries = {token: i for i, token in enumerate([*SPECIAL, *words(vocabulary)])}
    tokenizer = HuggingFaceTokenizer(models.WordPiece(entries, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", entries["[SEP]"]), ("[CLS]", entries["[CLS]"]))
    return tokenizer.to_str()


def byte_tokenizer_json(vocabulary: int) -> str:
    """Returns a tokenizer with one token for each byte. The rest of the vocabulary are special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HuggingFaceTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{number}|>" for number in range(len(letters), vocabulary)])
    return tokenizer.to_str()


def random_documents(config: BackboneConfig, tokens: int, length: int, seed: int) -> list[np.ndarray]:
    """Returns documents whose words follow Zipf's law, with the special tokens."""
    generator = np.random.default_rng(seed)
    ranks = np.arange(1, config.vocabulary - len(SPECIAL) + 1)
    weights = 1 / ranks
    ids = generator.choice(len(ranks), size=(max(1, tokens // length), length), p=weights / weights.sum()) + len(SPECIAL)
    if config.start_id is not None:
        ids[:, 0] = config.start_id
    else:
        ids[:, 0], ids[:, -1] = config.cls_id, config.sep_id
    return list(ids.astype(np.int32))


def random_backbone(config: BackboneConfig, seed: int = 0) -> tuple[LowerStack, UpperStack]:
    """Returns stacks with weights of BERT's initial distribution."""
    generator = torch.Generator().manual_seed(seed)
    lower, upper = LowerStack(config), UpperStack(config)
    with torch.no_grad():
        for stack in (lower, upper):
            for name, parameter in stack.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0.0, 0.02, generator=generator)
    return lower, upper


def random_store(
    folder: Path,
    config: BackboneConfig,
    tenants: Sequence[TenantVersion],
    domains: Sequence[str] = (),
    corpus_tokens: int = 20_000,
    spread: float = 0.02,
    seed: int = 0,
    dtype: str = "fp16",
    tokenizer: Callable[[int], str] | None = None,
) -> Store:
    """Makes a store with a root and its children `domains`, whose keys come from Zipf corpora. Rows are random.

    Every tenant gets an adapter and a head of its own. `spread` is the standard deviation of their weights. `tokenizer`: of a
    vocabulary; by default bytes for decoders and words for encoders.
    """
    lower, upper = random_backbone(config, seed)
    tokenizer = tokenizer or (byte_tokenizer_json if config.is_decoder else tokenizer_json)
    store = Store.create(folder, RANDOM, config, tokenizer(config.vocabulary), lower, upper)
    for number, domain in enumerate(["root", *domains]):
        if number and config.is_decoder:
            store.save_lower(domain, 1, random_backbone(config, seed + number)[0])
        random_table(store, domain, 1, ("root", 1) if number else None, corpus_tokens, seed + number, dtype)
    for number, tenant in enumerate(tenants):
        random_tenant(store, tenant, spread, seed + number)
    return store


def random_tenant(store: Store, tenant: TenantVersion, spread: float, seed: int) -> None:
    store.save_tenant(tenant, *random_weights(store.config, tenant, spread, seed), {})


def change_version(store: Store, tenant: TenantVersion, **changes: Any) -> None:
    """Changes a stored version, where a build would store a next one. `changes`: fields of its `TenantKnowledge`."""
    found, report, seen = replace(store.knowledge(tenant), **changes), store.report(tenant), store.seen(tenant)
    shutil.rmtree(store.tenant_folder(tenant.id, tenant.version))
    store.save_version(tenant, found, report, seen=seen)


def random_weights(config: BackboneConfig, tenant: TenantVersion, spread: float, seed: int) -> Weights:
    """Returns an adapter and a head in the form of the tenant's. `spread`: the standard deviation of their numbers."""
    generator = torch.Generator().manual_seed(seed)
    adapter = tenant.adapter_layout(config)
    weights = None if adapter is None else random_layers(adapter, spread, generator)
    return weights, random_layers(tenant.head_layout(config), spread, generator)[0] if tenant.has_head else {}


def random_knowledge(config: BackboneConfig, tenant: TenantVersion, spread: float, seed: int) -> TenantKnowledge:
    """Returns what a manager or a remote command adds as this tenant."""
    weights, own = random_weights(config, tenant, spread, seed)
    layout = tenant.adapter_layout(config)
    head = (tenant.head_layout(config), own) if tenant.has_head else None
    adapter = (layout, weights) if layout is not None and weights is not None else None
    own = (tenant.domain, tenant.domain_version, tenant.task, tuple(tenant.labels), head, adapter)
    return TenantKnowledge(*own, embedding=tenant.embedding)


def random_layers(layout: Layout, spread: float, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    return [
        {name: torch.randn(shape, generator=generator) * spread for name, shape in layout.shapes.items()}
        for _ in range(layout.layers)
    ]


def random_table(
    store: Store, domain: str, version: int, parent: tuple[str, int] | None, corpus_tokens: int, seed: int, dtype: str = "fp16"
) -> None:
    spec = table_spec(store.config, domain, version, parent, dtype, corpus_tokens)
    keys = ranked_keys(random_documents(store.config, corpus_tokens, 64, seed), spec.space, root=parent is None)
    write_table(store.table_folder(domain, version), spec, keys, random_values(spec, seed))


def ranked_keys(documents: Sequence[np.ndarray], space: KeySpace, root: bool) -> np.ndarray:
    """Returns the keys of all windows, and of an encoder's shorter forms, in the order of rows (`builder.tables.ranking`).

    Of a root, also all single tokens. The corpus must fit in memory.
    """
    whole = space.of(np.concatenate(documents), np.array([len(document) for document in documents]))
    ranked, places = [], []
    for level in reversed(range(len(space.masks))):
        keys = whole & space.masks[level]
        if space.window.causal:
            keys = keys[(keys == whole).all(1)]
        if level + 1 < len(space.masks):
            keys = keys[((keys & space.masks[level + 1]) != keys).any(1)]
        elif root:
            keys = np.concatenate([keys, space.unigrams()])
        keys = keys[order(keys)]
        starts = first_of_each(keys)
        counts = np.diff(np.append(starts, len(keys)))
        ranked.append(keys[starts[np.argsort(-counts, kind="stable")]])
        places.append((np.arange(len(starts)) + 0.5) / (len(starts) * (SHORTER_IN_ROOT if root and level else 1)))
    return np.concatenate(ranked)[np.argsort(np.concatenate(places), kind="stable")]


def random_values(spec: TableSpec, seed: int) -> Callable[[np.ndarray], torch.Tensor]:
    """Returns a function that gives normal random vectors instead of those of a lower stack."""
    generator = torch.Generator().manual_seed(seed)

    def values_of(windows: np.ndarray) -> torch.Tensor:
        stored = windows[:, spec.window.stored]
        values = torch.randn(*stored.shape, spec.hidden, generator=generator)
        return values.masked_fill(torch.from_numpy(stored == ABSENT).unsqueeze(-1), 0)

    return values_of


def random_tenants(count: int, rank: int, labels: int, domains: Sequence[str] = ("root",)) -> list[TenantVersion]:
    names = [f"label-{i}" for i in range(labels)]
    width = len(str(count - 1))
    return [
        TenantVersion(f"tenant-{i:0{width}d}", 1, domains[i % len(domains)], 1, "classify", names, rank) for i in range(count)
    ]


def random_exits(store: Store, tenant: TenantVersion, *given: Any, **options: Any) -> ExitKnowledge:
    """Gives a tenant of a store `random_exit_knowledge`."""
    found = random_exit_knowledge(store.config, tenant, *given, **options)
    change_version(store, tenant, exits=found)
    return found


def random_exit_knowledge(
    config: BackboneConfig, tenant: TenantVersion, exit: int | None = 0, threshold: float = 0.6, plans: int = 2, seed: int = 0
) -> ExitKnowledge:
    """Returns exits of random weights, and two plans: one with this threshold, and a cheaper one with half of it.

    `plans`: 1 leaves the cheaper one out.
    """
    layout = exit_layout(config, len(tenant.labels), tenant.dtype)
    drawn = random_layers(layout, 0.3, torch.Generator().manual_seed(seed))
    heads = [{name: weight.to(layout.torch_dtype) for name, weight in head.items()} for head in drawn]
    both = Plan(exit, threshold, 0.3, 0.9, 0.7), Plan(exit, threshold / 2, 0.3, 0.8, 0.5)
    return ExitKnowledge(Exits(None, (Calibration(temperature=1.5),) * layout.layers, both[:plans]), layout, heads)


def random_students(
    store: Store,
    tenant: TenantVersion,
    teams: Sequence[int] = (2,),
    depth: int = 1,
    rank: int = 4,
    spread: float = 0.3,
    seed: int = 0,
) -> StudentKnowledge:
    """Gives a tenant of a store students of random weights. `teams`: their numbers, the largest first."""
    config, generator = store.config, torch.Generator().manual_seed(seed)
    whole = adapter_layout(config, "lora", rank, every_place(config), dtype=tenant.dtype)
    assert whole is not None
    adapter, head = replace(whole, layers=depth), head_layout(config, len(tenant.labels), "tanh", tenant.dtype)
    members = [
        ((adapter, random_layers(adapter, spread, generator)), (head, random_layers(head, spread, generator)[0]))
        for _ in range(teams[0])
    ]
    sizes = tuple(Team(size, size * depth / config.upper_layers, Calibration(temperature=1.5)) for size in teams)
    found = StudentKnowledge(Students(depth, sizes), members)
    change_version(store, tenant, students=found)
    return found
