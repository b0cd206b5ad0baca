"""Saves a tenant as a plain checkpoint of `transformers`, for users who leave: the way back of an import.

The original's lower layers stand in place of the tables. They see whole texts, where tables see windows, so answers are
compared. The upper layers are the root's with the tenant's LoRA merged, and the head is the tenant's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builder.importing.agreement import agreement
from builder.importing.checkpoint import Family
from builder.importing.heads import (
    EVERY_TASK,
    LAST_OF_TASK,
    LAYERS,
    LAYERS_OF_OTHERS,
    NORM,
    SEQUENCE,
    SPAN,
    TASK_OF_ENDING,
    TASK_OF_PROBLEM,
)
from builder.importing.matching import TunedModel, answers_of
from builder.store.store import Store, TenantVersion, written_folder
from builder.tasks.examples import read_unlabelled
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.cutting import hold
from hplm.errors import InvalidInput
from hplm.model.families import ENCODERS, WEIGHT_AND_BIAS
from hplm.model.original import configuration_of, silent_transformers, tokenizer_of, weights_of
from hplm.tasks.tasks import TASKS

# A head of one layer passes through a function of two: tanh of a small number is the number, to a millionth, and relu and gelu
# leave a large one as it is.
SMALL, LARGE = 1e-3, 100.0
POOLED_BY = {"eurobert": "bos", "modernbert": "cls"}  # as a tenant reads the first token
STUDENTS = "the students: the checkpoint answers as the full stack does"
NO_ANSWER = "the score of no answer, for which transformers' head has no output: the checkpoint always answers"


def save_checkpoint(store: Store, tenant_id: str, folder: Path, texts: Path | None, device: torch.device) -> dict[str, Any]:
    """Returns the report; with `texts`, it says how many answers of both are the same."""
    if folder.exists():
        raise InvalidInput(f"{folder} exists: name a folder that does not")
    tenant = store.known_tenant(tenant_id)
    if tenant.embedding is not None:
        raise InvalidInput(f"tenant {tenant_id!r} makes vectors, and only a model with a head is saved: name another tenant")
    family = Family(store.model, store.config)
    layout = tenant.adapter_layout(store.config)
    if layout is not None and layout.kind != "lora":
        raise InvalidInput(
            f"tenant {tenant_id!r} has a {layout.kind}, which no layer of transformers can hold: only a LoRA can be merged "
            "(`hplm build tenant --adapter lora`)"
        )
    examples = list(read_unlabelled(texts)) if texts is not None else []
    adapter, head = store.tenant_weights(tenant)
    kind, stack = configuration_of(store.model).model_type, store.upper()
    upper = stack.layers
    if adapter is not None and layout is not None:
        hold(upper, upper, [{name: part.float() for name, part in own.items()} for own in adapter], layout)
    tensors: dict[str, Tensor] = {}
    config, parts_of = store.config, ENCODERS[kind].names
    for number, layer in enumerate(upper, config.lower_layers):
        for ours, names in parts_of.of_layer(number).items():
            sizes = [config.query_width, config.key_width, config.key_width] if len(names) == 3 else None
            for which in WEIGHT_AND_BIAS:
                if (own := getattr(layer.get_submodule(ours), which, None)) is not None:
                    parts = own.split(sizes) if sizes else own.chunk(len(names))
                    tensors |= {f"{name}.{which}": part for name, part in zip(names, parts, strict=True)}
    if not config.enters_normed:
        final = stack.final_norm.named_parameters(parts_of.body["final_norm"])
        tensors |= dict(final)
    model = _model(store, tenant)
    tensors = {f"{model.base_model_prefix}.{name}": tensor for name, tensor in tensors.items()}
    tensors |= _head(kind, tenant, {name: part.float() for name, part in head.items()})
    found = model.load_state_dict(tensors, strict=False)
    assert not found.unexpected_keys, found.unexpected_keys
    with written_folder(folder) as writing:
        model.save_pretrained(writing)
        tokenizer_of(store.model).save_pretrained(writing)
    report: dict[str, Any] = {"tenant": tenant.id, "version": tenant.version, "folder": str(folder)}
    if tenant.task == SPAN and len(tenant.labels) > len(TASKS[SPAN].fixed_labels):
        report["lost"] = NO_ANSWER
    if store.knowledge(tenant).students is not None:
        report["lost"] = STUDENTS
    if texts is not None:
        models = TunedModel.of_checkpoint(family.read(folder), device), TunedModel.of_tenant(store, tenant, device)
        reader, task = Reader(store, tenant.domain, tenant.domain_version), training_task(tenant.task).unlabelled()
        data, rows = answers_of(models, examples, reader, tenant.labels, task)
        report |= agreement(data, *rows).described()
    return report


def _model(store: Store, tenant: TenantVersion) -> Any:
    """Returns a model of the tenant's task with the original's weights, and a head that is yet to be set."""
    ending = next((ending for ending, task in TASK_OF_ENDING.items() if task == tenant.task), SEQUENCE)
    loader: Any = getattr(silent_transformers(), f"AutoModel{ending}")
    given: dict[str, Any] = {}
    if tenant.task != SPAN:
        given |= {"id2label": dict(enumerate(tenant.labels)), "label2id": {name: i for i, name in enumerate(tenant.labels)}}
    if ending == SEQUENCE:
        given["problem_type"] = next(problem for problem, task in TASK_OF_PROBLEM.items() if task == tenant.task)
        if (own := configuration_of(store.model)).model_type in POOLED_BY:
            given["classifier_pooling"] = POOLED_BY[own.model_type]
    if configuration_of(store.model).model_type in EVERY_TASK:
        given["classifier_bias"] = True
    return weights_of(store.model, loader, ignore_mismatched_sizes=True, **given)[0]


def _head(kind: str, tenant: TenantVersion, head: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tenant's head by the names that the family has for it."""
    first, function, last = LAYERS.get(kind, LAYERS_OF_OTHERS)
    weight, bias, width = head["weight"], head["bias"], head["weight"].shape[1]
    if kind in EVERY_TASK:
        if tenant.head_function != function:
            raise InvalidInput(
                f"a head of a {kind} has {function} between its two layers, and that of tenant {tenant.id!r} has "
                f"{tenant.head_function or 'one layer'}: name one that was imported from a {kind}"
            )
        outputs = len(TASKS[tenant.task].fixed_labels or tenant.labels)  # without no answer
        tensors = {f"{last}.weight": weight[:outputs], f"{last}.bias": bias[:outputs], f"{NORM}.weight": torch.ones(width)}
        return tensors | {f"{first}.weight": head["dense"], f"{first}.bias": head["dense_bias"]}
    if tenant.task in LAST_OF_TASK:
        if tenant.head_function is not None:
            raise InvalidInput(f"the head of tenant {tenant.id!r} has two layers, and those of transformers' {tenant.task} one")
        last, outputs = LAST_OF_TASK[tenant.task], len(TASKS[tenant.task].fixed_labels or tenant.labels)  # without no answer
        return {f"{last}.weight": weight[:outputs], f"{last}.bias": bias[:outputs]}
    if tenant.head_function == function:
        dense, dense_bias = head["dense"], head["dense_bias"]
    elif tenant.head_function is not None:
        raise InvalidInput(
            f"a head of a {kind} has {function} between its two layers, and tenant {tenant.id!r} has {tenant.head_function}: "
            "build one whose head has one layer"
        )
    elif function == "tanh":
        dense, dense_bias, weight = SMALL * torch.eye(width), torch.zeros(width), weight / SMALL
    else:
        dense, dense_bias, bias = torch.eye(width), torch.full((width,), LARGE), bias - LARGE * weight.sum(1)
    return {f"{first}.weight": dense, f"{first}.bias": dense_bias, f"{last}.weight": weight, f"{last}.bias": bias}
