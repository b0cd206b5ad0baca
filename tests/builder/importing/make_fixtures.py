"""Writes the fixtures with the libraries themselves; run from the root of the repository, in an environment of its own:

    pip install torch adapters==1.3.0 peft==0.21.2
    PYTHONHASHSEED=0 python -m tests.builder.importing.make_fixtures

Beside each adapter, expected.json holds what its library computes: hidden states entering the layers, at the split and at the
end, and the logits.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import adapters
import torch
from adapters import BertAdapterModel, BnConfig, DoubleSeqBnConfig, LoRAConfig, SeqBnConfig
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertForSequenceClassification, BertForTokenClassification

from tests.builder.checkpoints import SPLIT, TOKENS, drawn, save_base

FIXTURES = Path(__file__).parent / "fixtures"
LABELS = {0: "red", 1: "green", 2: "blue"}
EVERYWHERE = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]


def train(model: torch.nn.Module, *marks: str) -> None:
    """Writes random numbers into the parameters that training would change."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(mark in name for mark in marks):
                parameter.copy_(drawn(name, tuple(parameter.shape)))


def expect(model: torch.nn.Module, folder: Path) -> None:
    with torch.no_grad():
        result = model.eval()(torch.tensor([TOKENS]), output_hidden_states=True)

    def rounded(tensor: torch.Tensor) -> list:
        return [[round(number, 6) for number in row] for row in tensor.tolist()]

    states = result.hidden_states
    expected = {
        "start": rounded(states[0][0]),
        "split": rounded(states[SPLIT][0]),
        "end": rounded(states[-1][0]),
        "logits": rounded(result.logits.view(-1, result.logits.shape[-1])),
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", "utf-8")


def from_peft(base: str, name: str, is_tag: bool = False, **options: object) -> None:
    """Saves a LoRA: one of texts as safetensors, one of words as pickles."""
    folder, kind = FIXTURES / name, BertForTokenClassification if is_tag else BertForSequenceClassification
    own = {"task_type": TaskType.TOKEN_CLS} if is_tag else {"task_type": TaskType.SEQ_CLS, "lora_dropout": 0.1}
    model = get_peft_model(kind.from_pretrained(base, num_labels=len(LABELS)), LoraConfig(**own, **options))
    train(model, "lora_", "modules_to_save")
    model.save_pretrained(folder, safe_serialization=not is_tag)
    tidy(folder, base)
    expect(model, folder)


def from_adapters(base: str, name: str, config: object, add_head: str | None, safe: bool = False, **head: object) -> None:
    """Saves an adapter with a head of the library, or with that of a standard class."""
    folder = FIXTURES / name
    if add_head:
        model = BertAdapterModel.from_pretrained(base)
        getattr(model, f"add_{add_head}_head")("acme", num_labels=len(LABELS), id2label=LABELS, **head)
    else:
        label2id = {label: number for number, label in LABELS.items()}
        model = BertForSequenceClassification.from_pretrained(base, id2label=LABELS, label2id=label2id)
        adapters.init(model)
    model.add_adapter("acme", config=config)
    model.set_active_adapters("acme")
    train(model, "adapters.acme", "loras.acme", "heads.acme", "classifier")
    model.save_adapter(str(folder), "acme", with_head=True, use_safetensors=safe)
    tidy(folder, base)
    expect(model, folder)


def tidy(folder: Path, base: str) -> None:
    """Removes the paths of the machine that wrote the files."""
    (folder / "README.md").unlink(missing_ok=True)
    for path in folder.glob("*.json"):
        path.write_text(path.read_text("utf-8").replace(base, "tiny-bert"), "utf-8")


def main() -> None:
    shutil.rmtree(FIXTURES, ignore_errors=True)
    with tempfile.TemporaryDirectory() as base:
        save_base(Path(base))
        upper = {"layers_to_transform": [2, 3], "layers_pattern": "layer"}
        query, some = "layer.2.attention.self.query", ["query", "output.dense"]
        own = {"rank_pattern": {query: 5}, "alpha_pattern": {query: 1, "3.output.dense": 7}}
        from_peft(base, "peft-everywhere", r=4, lora_alpha=6, target_modules=EVERYWHERE, **upper)
        from_peft(base, "peft-pooler", r=3, lora_alpha=2, use_rslora=True, modules_to_save=["pooler"], **upper)
        from_peft(base, "peft-tag-patterns", is_tag=True, r=2, lora_alpha=4, target_modules=some, **own, **upper)
        from_peft(base, "peft-lower", r=2, lora_alpha=3, target_modules=[*EVERYWHERE, "pooler.dense"])
        left = {"leave_out": [0, 1]}
        channels = DoubleSeqBnConfig(reduction_factor=8, scaling="channel", **left)
        learned = {"reduction_factor": {"2": 4, "default": 8}, "non_linearity": "gelu", "scaling": "learned", **left}
        lora = LoRAConfig(r=4, alpha=6, attn_matrices=["q", "k", "v"], intermediate_lora=True, output_lora=True, **left)
        after = BnConfig(mh_adapter=False, output_adapter=True, **learned)
        from_adapters(base, "adapters-double", channels, "classification")
        from_adapters(base, "adapters-learned-scale", after, "classification", layers=1, use_pooler=True)
        from_adapters(base, "adapters-lora-tag", lora, "tagging", safe=True)
        from_adapters(base, "adapters-stock-head", DoubleSeqBnConfig(reduction_factor=16, scaling=0.5, **left), None)
        from_adapters(base, "adapters-refused", SeqBnConfig(reduction_factor=16, **left), "classification")
        from_adapters(base, "adapters-lower", DoubleSeqBnConfig(reduction_factor=16), "tagging")


if __name__ == "__main__":
    main()
