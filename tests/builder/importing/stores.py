"""A store made from the BERT that the fixtures' adapters were trained on, and changed copies of fixtures.

`peft` 0.21.2 wrote the fixtures (`git show 7ea83ed6:tests/builder/importing/make_fixtures.py`).
Beside each adapter, expected.json has what its library computes: hidden states entering the layers, at the split and at the
end, and the logits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from builder.store.store import Store
from hplm.model.checkpoint import load_checkpoint, split
from tests.builder.checkpoints import SIZES, SPLIT, save_base, save_tokenizer
from tests.builder.stores import build, some_lines

FIXTURES = Path(__file__).parent / "fixtures"
LABELS = ["red", "green", "blue"]
SEQUENCE = "ForSequenceClassification"
KINDS = ("Transformer", "Pooling", "Normalize")


def make_imported_store(folder: Path, lower: int = SPLIT, upper: int | None = None) -> Path:
    """Makes a store with a root. Neither half is adapted, so layers are those of the original."""
    base = folder / "base"
    save_base(base)
    save_tokenizer(base, SIZES["vocab_size"])
    checkpoint = load_checkpoint(str(base), "tiny", lower, upper)
    store = Store.create(folder / "store", str(base), checkpoint.config, checkpoint.tokenizer_json, *split(checkpoint))
    build(store, folder, "root", some_lines(20, seed=0))
    return store.folder


def changed(folder: Path, name: str, file: str = "", change: dict[str, Any] | bytes | None = None) -> Path:
    """Returns a copy of a fixture. One of its files gets other fields or tensors, or another content, or goes."""
    copy = Path(shutil.copytree(FIXTURES / name, folder / name))
    if isinstance(change, dict):
        (put if file.endswith(".json") else put_tensors)(copy / file, **change)
    elif change is not None:
        (copy / file).write_bytes(change)
    elif file:
        (copy / file).unlink()
    return copy


def put(path: Path, **fields: object) -> None:
    """Writes fields into a JSON file."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(stored | fields))


def put_tensors(path: Path, **tensors: Any) -> None:
    """Writes tensors into a file, or what a function makes of those that are there. None: a tensor goes."""
    is_safe = path.suffix == ".safetensors"
    stored = load_file(path) if is_safe else torch.load(path)
    stored |= {name: new(stored[name]).clone() if callable(new) else new for name, new in tensors.items()}
    left = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(left, path, metadata={"format": "pt"}) if is_safe else torch.save(left, path)


def texts(folder: Path, count: int = 120) -> Path:
    path = folder / "texts.txt"
    path.write_text("\n".join(" ".join(line.split()[:9]) for line in some_lines(count, 7)), "utf-8")
    return path


def embedding(folder: Path, pooling: str = "mean_tokens", modules: tuple[str, ...] = KINDS, **config: object) -> Path:
    """Saves the fixtures' BERT as sentence-transformers does, after it was fine-tuned. `config`: prompts."""
    tuned(folder, "Model")
    listed = [
        {"path": "1_Pooling" if kind == "Pooling" else "", "type": f"sentence_transformers.models.{kind}"} for kind in modules
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
    put(folder / "1_Pooling/config.json", **modes)
    put(folder / "config_sentence_transformers.json", **config)
    return folder


def tuned(folder: Path, ending: str = SEQUENCE, change: float = 0.03, **config: object) -> Path:
    """Saves the fixtures' BERT with a head, as if it had been fine-tuned: all of its weights have changed a little."""
    save_base(folder)
    torch.manual_seed(1)
    named = {"num_labels": 3} | config if ending != "Model" else config
    model = getattr(transformers, f"Bert{ending}").from_pretrained(folder, **named)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (ending == "Model" or name.startswith("bert.")) and "pooler" not in name:
                parameter.add_(change * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder, SIZES["vocab_size"])
    return folder
