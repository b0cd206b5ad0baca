"""Reads a checkpoint that was fine-tuned in full, as `transformers` saved it, beside the model that it descends from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builder.console import waiting
from builder.importing.foreign import ADAPTER_CONFIG, CONFIG, ForeignHead, check_shapes, read_json
from builder.importing.heads import (
    EVERY_TASK,
    LAST_OF_TASK,
    LATE,
    LAYERS,
    LAYERS_OF_OTHERS,
    MEAN,
    POOLING,
    SEQUENCE,
    TASK_OF_ENDING,
    Linear,
    chosen_labels,
    classifier,
    folded,
    numbered_labels,
    reordered,
)
from builder.importing.sentence_transformers import MODULES, embedding_files, makes_vectors, read_embedding
from builder.learning.bodies import WholeBody, checkpoint_of
from builder.store.resumable import digest_of
from builder.training.cutting import cut
from builder.training.model import TenantModel, Weights
from hplm.adapters.layout import Layout, head_layout
from hplm.errors import HplmError, InvalidInput
from hplm.model.checkpoint import full_stack
from hplm.model.config import BackboneConfig
from hplm.model.families import ENCODERS, described
from hplm.model.layer import QKV
from hplm.model.original import Checkpoint, configuration_of, silent_transformers, weights_of
from hplm.tenants.embedding import Embedding
from hplm.tenants.knowledge import Head

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
EMBED = "embed"  # the task of models without a head
FAR = 0.5  # of a matrix' own size. Fine-tuning changes some hundredths; matrices of two models differ by 1.4
# The parts of a tokenizer that choose its tokens, and what users call them.
TOKENIZING = {"model": "vocabulary", **{part: part for part in ("normalizer", "pre_tokenizer", "post_processor")}}


@dataclass(frozen=True)
class Finetuned:
    checkpoint: Checkpoint
    head: ForeignHead
    labels: list[str]
    distance: float  # from the model it descends from: the median change of a matrix, as a share of its size
    embedding: Embedding | None = None  # how it makes vectors; None: it has a head
    activation: str | None = None  # that a cross-encoder's library puts behind its logit

    @property
    def head_layout(self) -> Layout | None:
        """The layout of its head; None: it makes vectors."""
        if self.embedding is not None:
            return None
        return head_layout(self.checkpoint.config, len(self.labels), self.head.function)

    @property
    def head_bytes(self) -> int:
        return self.head_layout.weight_bytes if self.head_layout is not None else 0

    @property
    def noted(self) -> dict[str, Any]:
        """Returns what the report says of it: facts that change its answers."""
        noted = {"activation": self.activation, "limit": self.embedding.limit if self.embedding is not None else None}
        return {name: value for name, value in noted.items() if value is not None}

    def head_of(self, weights: Weights) -> Head | None:
        """Returns a head of its form with these weights; None if it makes vectors."""
        return (self.head_layout, weights) if self.head_layout is not None else None

    def loaded(self, device: torch.device) -> tuple[WholeBody, TenantModel]:
        """Returns the whole model and its head, to ask them."""
        head = TenantModel.of(None, self.head_of(self.head.weights), self.embedding).to(device)
        head.pools |= self.head.reads_means
        return WholeBody(self.checkpoint).to(device).eval().requires_grad_(False), head

    def with_labels(self, labels: list[str]) -> Finetuned:
        """Returns it with the rows of its head in another order."""
        head = replace(self.head, weights=reordered(self.head.weights, self.labels, labels))
        return replace(self, head=head, labels=labels)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a whole model: a configuration, and no adapter beside it. One that nobody may read has none."""
    return os.path.exists(folder / CONFIG) and not os.path.exists(folder / ADAPTER_CONFIG)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a checkpoint's weights. Of both kinds side by side, the safetensors."""
    found = (sorted(folder.glob(pattern)) for pattern in WEIGHTS)
    if files := next((files for files in found if files), None):
        return files
    raise InvalidInput(f"{folder} has no weights ({' or '.join(WEIGHTS)}): copy or save the checkpoint again")


def digest(folder: Path) -> str:
    return digest_of(folder / CONFIG, *weight_files(folder), *embedding_files(folder))


def size(folder: Path) -> int:
    """Returns the bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in weight_files(folder))


class Family:
    """The model that a root was made from, and what is read of the checkpoints that descend from it."""

    def __init__(self, model: str, config: BackboneConfig) -> None:
        self._model, self._config = model, config
        if config.is_decoder:
            raise InvalidInput(f"backbone {config.name!r} is a decoder: only fine-tuned encoders can be imported")
        with waiting(f"reading {model}"):
            self.base, self._configuration = checkpoint_of(model, config), configuration_of(model)
        if self.base.skipbert:
            raise InvalidInput(f"{model!r} is a SkipBERT, from which nothing that transformers knows descends")
        if (left := self.base.total_layers - config.lower_layers - config.upper_layers) > 0:
            raise InvalidInput(
                f"the root leaves out the last {left} layers of {model!r}, on which the head of a checkpoint stands: build a "
                "root whose --lower and --upper are all layers"
            )

    def read(self, folder: Path, labels: list[str] | None = None, task: str | None = None) -> Finetuned:
        """Reads a checkpoint, and refuses one that has no head or descends from another model.

        `labels` and `task`: what its files do not say.
        """
        try:
            with waiting(f"reading {folder}"):
                return self._read(folder, labels, task)
        except (HplmError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the libraries raise anything at a damaged file
            said = next(iter(str(error).strip().splitlines()), "")
            raise InvalidInput(
                f"{folder} cannot be read ({type(error).__name__}: {said}): copy or save the checkpoint again"
            ) from error

    def _read(self, folder: Path, labels: list[str] | None, task: str | None) -> Finetuned:
        path = folder / CONFIG
        stored = read_json(path)
        if stored.get("model_type") not in ENCODERS:
            raise InvalidInput(f"{path} is of {described(stored.get('model_type'))}: import one of {', '.join(ENCODERS)}")
        named = str(next(iter(stored.get("architectures") or ()), None))
        ending = next((ending for ending in TASK_OF_ENDING if named.endswith(ending)), None)
        embedding = read_embedding(folder, self._config) if makes_vectors(folder) else None
        if embedding is not None and (labels or task not in (None, EMBED)):
            raise InvalidInput(f"{folder} makes vectors, as its {MODULES} says: leave --labels and --task out")
        if embedding is None and ending is None:
            raise InvalidInput(
                f"{path}: tenants do not answer as {named} does: import a model whose class ends in "
                f"{', '.join(TASK_OF_ENDING)}, or one that sentence-transformers saved, with {MODULES}"
            )
        weight_files(folder)
        configuration = configuration_of(str(folder))
        self._check(folder, configuration, self._configuration, ("model_type", "num_hidden_layers"))
        checkpoint = checkpoint_of(str(folder), self._config)
        self._check(folder, checkpoint.config, self.base.config, [field.name for field in fields(BackboneConfig)])
        own, wanted = (json.loads(one.tokenizer_json) for one in (checkpoint, self.base))
        for part, said in TOKENIZING.items():
            if own.get(part) != wanted.get(part):
                raise Misfit(folder, f"the tokenizer of {folder} has another {said} than that of {self._model!r}")
        distance = _distance(checkpoint.weights, self.base.weights)
        if not distance < FAR:
            raise Misfit(
                folder,
                f"the weights of {folder} differ from those of {self._model!r} by {distance:.2f} of their size, more than "
                f"fine-tuning changes ({FAR} at most)",
            )
        if embedding is not None:
            return Finetuned(checkpoint, ForeignHead(path, EMBED, {}, None, []), [], distance, embedding)
        assert ending is not None  # else it was refused
        names = numbered_labels({"id2label": configuration.id2label})  # of two, transformers 4 has not saved them
        head = _head(folder, named, configuration.model_type, ending, task, names)
        labels = chosen_labels(head.task, labels, names, len(head.weights["weight"]), path)
        layout = head_layout(checkpoint.config, len(labels), head.function)
        check_shapes(head.weights, layout, checkpoint.config, path, "the head")
        return Finetuned(checkpoint, head, labels, distance, activation=_activation(stored))

    def _check(self, folder: Path, found: Any, base: Any, names: Iterable[str]) -> None:
        for name in names:
            if (own := getattr(found, name)) != (wanted := getattr(base, name)):
                raise Misfit(folder, f"{folder} has {name} {own}, and {self._model!r} has {wanted}")

    def change(self, found: Finetuned, layout: Layout) -> tuple[list[Weights], float]:
        """Returns what fine-tuning changed in the upper layers, cut to a LoRA, and the share of it that is left."""
        before, after = (full_stack(checkpoint)[-layout.layers :] for checkpoint in (self.base, found.checkpoint))
        return cut(before, after, layout)


class Misfit(InvalidInput):
    """A checkpoint does not descend from the root's model, for this reason."""

    def __init__(self, folder: Path, reason: str) -> None:
        self.reason, found = reason, configuration_of(str(folder))
        sizes = f"{found.num_hidden_layers} layers of width {found.hidden_size}, {found.vocab_size:,} tokens"
        began = read_json(folder / CONFIG).get("_name_or_path") or "MODEL"  # which earlier releases of transformers saved
        super().__init__(
            f"{reason}: build a root of the model that it was fine-tuned from, a {found.model_type} ({sizes}), and import it "
            f"there: `hplm import --root {began} --from {folder} --texts FILE --store NEW`"
        )


def _distance(weights: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> float:
    """Returns the median change of a matrix."""
    names = [name for name in base if name.endswith(".weight") and base[name].ndim == 2 and name.startswith("layers.")]
    changes: list[float] = []
    for name in (*names, "words.weight"):
        parts = 3 if f".{QKV}." in name else 1
        for own, before in zip(weights[name].chunk(parts), base[name].chunk(parts), strict=True):
            changes += [float((own - before).norm() / size)] if (size := before.norm()) else []
    return float(torch.tensor(changes).median())


def _activation(stored: Mapping[str, Any]) -> str | None:
    """Returns the function that sentence-transformers has noted for a cross-encoder, such as sigmoid."""
    own = stored.get("sentence_transformers") or {}
    named = own.get("activation_fn") or stored.get("sbert_ce_default_activation_function")
    return str(named).rpartition(".")[2].lower() if named else None


def _head(folder: Path, named: str, kind: str, ending: str, task: str | None, labels: list[str] | None) -> ForeignHead:
    """Reads the head by the class that saved it."""
    path, trained = folder / CONFIG, TASK_OF_ENDING[ending]
    model, report = weights_of(str(folder), getattr(silent_transformers(), f"AutoModel{ending}"))
    if type(model).__name__ != named:
        raise InvalidInput(f"{path}: transformers has no class {named} for a {kind}: a class of your own cannot be imported")
    if report["missing_keys"]:
        raise InvalidInput(
            f"{folder} has no {min(report['missing_keys'])}, a part of its head: save it after it was fine-tuned"
        )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def linear(name: str) -> Linear:
        return tensors[f"{name}.weight"], tensors.get(f"{name}.bias")

    first, function, last = LAYERS.get(kind, LAYERS_OF_OTHERS)
    pooling = getattr(model.config, POOLING, None) if ending == SEQUENCE else None
    if pooling == LATE:
        raise InvalidInput(
            f"{path} has classifier_pooling {LATE!r}, the mean of the answers of all tokens: fine-tune with 'bos' or {MEAN!r}"
        )
    outputs = folded(linear(last), tensors) if kind in EVERY_TASK else linear(LAST_OF_TASK.get(trained, last))
    head = classifier(path, path, outputs, trained, task, labels, lambda: linear(first), function, kind in EVERY_TASK)
    return replace(head, reads_means=pooling == MEAN)
