"""Reads what sentence-transformers saves beside a model: how a vector is made of the states of a text, and the prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builder.importing.foreign import WRITTEN, read_json
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tenants.embedding import FIRST, MEAN, Embedding

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
LIMIT, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"  # one has the most tokens that are read of a text
TRANSFORMER, POOLING, NORMALIZE = KINDS = "Transformer", "Pooling", "Normalize"
POOLINGS = {"mean_tokens": MEAN, "mean": MEAN, "cls_token": FIRST, "cls": FIRST}
TAKEN = "import a model of a Transformer, a Pooling by mean or cls, and perhaps Normalize"


def makes_vectors(folder: Path) -> bool:
    return (folder / MODULES).is_file()


def embedding_files(folder: Path) -> list[Path]:
    """Returns the files that say how the model makes vectors; none of one that has a head."""
    own = (MODULES, PROMPTS, LIMIT, TOKENIZER, "*_Pooling/config.json") if makes_vectors(folder) else ()
    return [path for pattern in own for path in sorted(folder.glob(pattern))]


def read_embedding(folder: Path, config: BackboneConfig) -> Embedding:
    """Returns how the model makes vectors. Refuses modules and poolings that a tenant does not have, by their names."""
    path = folder / MODULES
    try:
        listed = json.loads(path.read_text("utf-8"))
        modules: dict[str, str] = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in listed}
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"{path} does not list modules ({type(error).__name__}: {error}): {WRITTEN}") from None
    if [*modules] not in ([*KINDS], [*KINDS[:2]]):
        raise InvalidInput(f"{path} has the modules {', '.join(modules)}, in this order: {TAKEN}")
    read = (read_json(folder / name) if (folder / name).exists() else {} for name in (PROMPTS, LIMIT, TOKENIZER))
    prompts, own, tokenizer = read
    limit = own.get("max_seq_length") or tokenizer.get("model_max_length") or config.positions
    try:
        return Embedding.read(
            {
                "dimensions": prompts.get("truncate_dim") or config.hidden,
                "pooling": _pooling(folder / modules[POOLING] / "config.json"),
                "normalised": NORMALIZE in modules,
                "limit": limit if limit < config.positions else None,
                "prefixes": prompts.get("prompts") or {},
                "prefix": prompts.get("default_prompt_name") or "",
            }
        )
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{folder / PROMPTS} or {LIMIT}: {error}: {WRITTEN}") from None


def _pooling(path: Path) -> str:
    stored: dict[str, Any] = read_json(path)
    named = stored.get("pooling_mode")
    modes = [name.removeprefix("pooling_mode_") for name, is_on in stored.items() if name.startswith("pooling_mode_") and is_on]
    modes = ([named] if isinstance(named, str) else list(named)) if named else modes
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise InvalidInput(f"{path} pools by {' and '.join(map(str, modes)) or 'nothing'}: {TAKEN}")
    if not stored.get("include_prompt", True):
        raise InvalidInput(f"{path} leaves the prompt out of the mean (include_prompt), which no tenant does: {TAKEN}")
    return POOLINGS[modes[0]]
