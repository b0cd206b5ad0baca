"""Makes checkpoints as users of `transformers` make them, and mixes of their differences; compares one that was exported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.importing.checkpoint import SEQUENCE, TASK_OF_ENDING
from builder.importing.matching import Model
from builder.importing.plain import save_checkpoint
from builder.packed_batches import packed_batches
from builder.store.store import Store, TenantFile, written_folder
from builder.tasks.examples import Example
from builder.tasks.lookup import Pack, Reader
from builder.tasks.tasks import training_task
from demo.data import DemoTenant
from hplm.model.original import silent_transformers, tokenizer_of, weights_of
from hplm.model.word_spans import words_of
from hplm.tasks import find_task

RATE, WARM_UP = 5e-5, 0.1  # of fine-tuning, as papers on BERT do it
BATCH_TEXTS = 16
UNREAD = -100  # the target that transformers leaves out
MIXED = 3  # differences in a mix


def loader_of(task: str) -> Any:
    ending = next((ending for ending, own in TASK_OF_ENDING.items() if own == task), SEQUENCE)
    return getattr(silent_transformers(), f"AutoModel{ending}")


def finetune(source: str, task: DemoTenant, folder: Path, passes: int, device: torch.device) -> None:
    """Fine-tunes all weights by `transformers` alone, and saves the checkpoint."""
    tokenizer, labels = tokenizer_of(source), list(task.labels)
    number_of = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(0)
    names = {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": number_of}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # random numbers would take most of the time
    model, _ = weights_of(source, loader_of(task.task), **names, **without)
    cut = {"truncation": True, "max_length": min(tokenizer.model_max_length, model.config.max_position_embeddings)}
    examples = training_task(task.task).read(task.train)
    encoded = [tokenizer(example.text, return_offsets_mapping=True, **cut) for example in examples]
    of_text = find_task(task.task).reads_first_token
    targets = [
        [number_of[one.labels[0]]] if of_text else _targets(one, own["offset_mapping"], number_of)
        for one, own in zip(examples, encoded, strict=True)
    ]
    lengths, rng = np.array([len(own["input_ids"]) for own in encoded]), np.random.default_rng(0)
    batches = [batch for _ in range(passes) for batch in packed_batches(lengths, BATCH_TEXTS, rng)]
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = silent_transformers().get_linear_schedule_with_warmup(optimizer, round(WARM_UP * len(batches)), len(batches))
    for batch in batches:
        given = tokenizer.pad([{"input_ids": encoded[i]["input_ids"]} for i in batch], return_tensors="pt").to(device)
        longest = 1 if of_text else given["input_ids"].shape[1]
        wanted = torch.tensor([[*targets[i], *[UNREAD] * (longest - len(targets[i]))] for i in batch], device=device)
        model(**given, labels=wanted[:, 0] if of_text else wanted).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with written_folder(folder) as writing:
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)


def _targets(example: Example, places: Sequence[tuple[int, int]], number_of: dict[str, int]) -> list[int]:
    """Returns the label of each word at its first token."""
    label_at = {start: label for (start, _), label in zip(words_of(example.text), example.labels, strict=True)}
    return [number_of[label_at[start]] if start in label_at and start < stop else UNREAD for start, stop in places]


def mix(source: str, checkpoints: Sequence[tuple[str, Path]], number: int, folder: Path) -> int:
    """Writes a checkpoint whose difference from the source is a mix of those of some checkpoints, at another size.

    So its spectrum decays as real ones do. Its head is that of the checkpoint with the largest share, whose place is returned.
    """
    rng = np.random.default_rng(number)
    chosen = rng.permutation(len(checkpoints))[:MIXED].tolist()
    shares, size = sorted(rng.dirichlet(np.ones(len(chosen))), reverse=True), rng.uniform(0.5, 1.5)
    task, first = checkpoints[chosen[0]]
    model, _ = weights_of(str(first), loader_of(task))
    base, own = _encoder(source), model.base_model.state_dict()
    others = [_encoder(str(checkpoints[place][1])) for place in chosen]
    names = [name for name in base if not name.startswith("pooler.") and base[name].is_floating_point()]
    weighted = [*zip(map(float, shares), others, strict=True)]
    changes = {name: torch.as_tensor(sum(share * (other[name] - base[name]) for share, other in weighted)) for name in names}
    before, after = (_norm(part) for part in ([own[name] - base[name] for name in names], changes.values()))
    own.update({name: base[name] + size * before / after * changes[name] for name in names})
    model.base_model.load_state_dict(own)
    with written_folder(folder) as writing:
        model.save_pretrained(writing)
        tokenizer_of(source).save_pretrained(writing)
    return chosen[0]


def _encoder(model: str) -> dict[str, Tensor]:
    return weights_of(model, silent_transformers().AutoModel)[0].state_dict()


def _norm(parts: Iterable[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())


@torch.no_grad()
def exported_back(
    store: Store, tenant: TenantFile, folder: Path, examples: Sequence[Example], device: torch.device
) -> dict[str, Any]:
    """Exports a tenant, and asks `transformers` the same texts: as it is, and with the states from the tables.

    Returns the share of answers that are the tenant's, and the largest difference of a logit from the same states.
    """
    save_checkpoint(store, tenant.id, folder, None, device)
    plain = weights_of(str(folder), loader_of(tenant.task))[0].to(device).eval()
    reader, own = Reader(store, tenant.domain, tenant.domain_version), Model.of_tenant(store, tenant, device)
    texts = reader.read(examples, training_task(tenant.task).unlabelled(), tenant.labels)
    same, apart, entering = [], 0.0, list[Tensor]()

    def enter(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (entering.pop()[None], *given[1:]) if entering else None

    def asked(pack: Pack) -> Tensor:
        logits = plain(pack.tokens[None]).logits[0]
        return logits[None] if logits.ndim == 1 else logits[pack.reading]

    plain.base_model.encoder.layer[store.config.lower_layers].register_forward_pre_hook(enter)
    for number in range(len(texts.texts)):
        pack = reader.pack(texts, np.array([number]), device)
        first, *_, last = own.own.states(own.body, pack)
        wanted = own.own.read(last[pack.reading])
        same += (asked(pack).argmax(1) == wanted.argmax(1)).tolist()
        entering.append(first)
        apart = max(apart, float((asked(pack) - wanted).abs().max()))
    return {"answers": len(same), "plain": float(np.mean(same)), "windowed_apart": apart}
