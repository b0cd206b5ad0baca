"""A store of any size with random weights and a made-up vocabulary: for benchmarks and tests, where only the shapes count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from builder.ngrams import count
from builder.store import Store, TenantFile
from hplm.model.checkpoint import random_backbone
from hplm.model.config import BackboneConfig
from hplm.model.windows import ABSENT
from hplm.plot.keys import KeySpace
from hplm.plot.table import TableMeta, write_table

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

MINILM = BackboneConfig("minilm", 30522, 384, 12, 1536, 3, 3, 512, 2, "gelu", 1e-12, 2, 3, 1, 4)
BERT_BASE = BackboneConfig("bert-base", 30522, 768, 12, 3072, 6, 6, 512, 2, "gelu", 1e-12, 2, 3, 1, 4)


def word(number: int) -> str:
    """The text of a token: `w` and letters, so that it survives lower-casing and stays one word."""
    letters = ""
    while True:
        number, rest = divmod(number, 26)
        letters = chr(ord("a") + rest) + letters
        if not number:
            return "w" + letters


def words(vocabulary: int) -> list[str]:
    """The last one is not ASCII: a server's process may think in ASCII, and its tokenizer must not."""
    return [*(word(i) for i in range(vocabulary - len(SPECIAL) - 1)), "水"]


def tokenizer_json(vocabulary: int) -> str:
    """One token a word, lower case, BERT's special tokens in BERT's places."""
    entries = {token: i for i, token in enumerate([*SPECIAL, *words(vocabulary)])}
    tokenizer = HuggingFaceTokenizer(models.WordPiece(entries, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", entries["[SEP]"]), ("[CLS]", entries["[CLS]"]))
    return tokenizer.to_str()


def random_documents(config: BackboneConfig, tokens: int, length: int, seed: int) -> list[np.ndarray]:
    """Documents whose words follow Zipf's law, special tokens included."""
    generator = np.random.default_rng(seed)
    ranks = np.arange(1, config.vocabulary - len(SPECIAL) + 1)
    weights = 1 / ranks
    ids = generator.choice(len(ranks), size=(max(1, tokens // length), length), p=weights / weights.sum()) + len(SPECIAL)
    ids[:, 0], ids[:, -1] = config.cls_id, config.sep_id
    return list(ids.astype(np.int32))


def random_store(
    folder: Path,
    config: BackboneConfig,
    tenants: Sequence[TenantFile],
    domains: Sequence[str] = (),
    corpus_tokens: int = 20_000,
    spread: float = 0.02,
    seed: int = 0,
) -> Store:
    """Root and `domains` (its children) with the keys of Zipf corpora; every tenant gets an adapter and a head of its own."""
    lower, upper = random_backbone(config, seed)
    store = Store.create(folder, "random weights", config, tokenizer_json(config.vocabulary), lower, upper)
    for number, domain in enumerate(["root", *domains]):
        _random_table(store, domain, ("root", 1) if number else None, corpus_tokens, seed + number)
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    for tenant in tenants:
        shapes = {
            "down": (tenant.rank, config.hidden),
            "down_bias": (tenant.rank,),
            "up": (config.hidden, tenant.rank),
            "up_bias": (config.hidden,),
        }

        adapter = [{name: normal(shape) for name, shape in shapes.items()} for _ in range(config.upper_layers)]
        head = {"weight": normal((len(tenant.labels), config.hidden)), "bias": normal((len(tenant.labels),))}
        store.save_tenant(tenant, adapter if tenant.rank else None, head, {})
    return store


def _random_table(store: Store, domain: str, parent: tuple[str, int] | None, corpus_tokens: int, seed: int) -> None:
    config, generator = store.config, torch.Generator().manual_seed(seed)
    space = KeySpace(config.vocabulary, config.window)
    keys = count(random_documents(config, corpus_tokens, 64, seed), space).keys
    if parent is None:
        keys = np.union1d(keys, space.unigrams())
    meta = TableMeta(
        domain=domain,
        version=1,
        parent=parent[0] if parent else None,
        parent_version=parent[1] if parent else None,
        n=config.window,
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        dtype="fp16",
        keys=len(keys),
        corpus_tokens=corpus_tokens,
    )

    def values_of(windows: np.ndarray) -> torch.Tensor:
        values = torch.randn(*windows.shape, config.hidden, generator=generator)
        return values.masked_fill(torch.from_numpy(windows == ABSENT).unsqueeze(-1), 0)

    write_table(store.table_folder(domain, 1), meta, keys, values_of)


def random_tenants(count: int, rank: int, labels: int, domains: Sequence[str] = ("root",)) -> list[TenantFile]:
    names = [f"label-{i}" for i in range(labels)]
    width = len(str(count - 1))
    return [
        TenantFile(f"tenant-{i:0{width}d}", 1, domains[i % len(domains)], 1, "classify", names, rank) for i in range(count)
    ]

