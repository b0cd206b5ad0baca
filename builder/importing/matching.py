"""Makes a tenant of a checkpoint: what fine-tuning changed in the upper layers, cut to a LoRA, learns what the cut lost.

It learns from unlabelled texts, by the checkpoint's states after every upper layer and by its answers. What fine-tuning
changed below the tables no tenant can have, so the report says how many answers are the checkpoint's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.importing.adapter_import import ImportOptions, checked, origin_of
from builder.importing.agreement import agreement, differing
from builder.importing.checkpoint import EMBED, Family, Finetuned, digest, size
from builder.importing.options import Matching
from builder.importing.reports import advice
from builder.importing.texts import UnlabelledTexts, taught
from builder.learning.bodies import Body, PlotBody
from builder.learning.limits import Epochs, check_rank
from builder.learning.loop import ParameterGroup, Training, train
from builder.learning.progress import Exam
from builder.packed_batches import packed_batches
from builder.page import import_page
from builder.pictures import draw_learning
from builder.store.resumable import replaced
from builder.store.step import Step
from builder.store.store import Store, TenantVersion
from builder.store.version import Weights
from builder.tables.build_folder import locked_tenant
from builder.tasks.examples import Example
from builder.tasks.lookup import Pack, Reader
from builder.tasks.tasks import Rows, TrainingTask, training_task
from builder.training.data import Data
from builder.training.finetuning import logits_of
from builder.training.model import TenantModel
from hplm.adapters.layout import Layout, adapter_layout, every_place
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tenants.embedding import Embedding
from hplm.tenants.knowledge import Adapter, Head

DOUBT = 2.0  # a later epoch is kept if it is at most so many standard errors worse than the best
SAVED = "matching.pt"
NOTE = (
    "the change of the upper layers was cut to a LoRA, which has learned to answer like the checkpoint; what fine-tuning "
    "changed below the tables is lost"
)


def lora_of(matching: Matching, config: BackboneConfig) -> Layout:
    check_rank(matching.rank, config.hidden)
    layout = adapter_layout(config, "lora", matching.rank, every_place(config))
    assert layout is not None  # its rank is not 0
    return layout


class Unlike(InvalidInput):
    """The tenant answers too often unlike its checkpoint, and was not stored."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class Refused:
    """The newest refused import of a tenant: its report and its weights, so that the same command need not learn again."""

    file: Path

    @classmethod
    def of(cls, store: Store, tenant_id: str) -> Refused:
        return cls(store.folder / "refused" / f"{tenant_id}.pt")

    def read(self, asked: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Weights] | None:
        """Returns the report and the weights if the same was asked. `folder`: where the checkpoint is now."""
        if not self.file.exists():
            return None
        kept = torch.load(self.file, weights_only=True)
        report = json.loads(kept["report"])
        report["imported"]["from"] = str(folder.resolve())
        return (report, kept["weights"]) if report["asked"] == asked else None

    def keep(self, report: dict[str, Any], model: TenantModel) -> None:
        self.file.parent.mkdir(exist_ok=True)
        with replaced(self.file) as temporary:
            torch.save({"report": json.dumps(report), "weights": model.stored()}, temporary)

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)


@dataclass(frozen=True)
class TunedModel:
    """A body with an adapter and a head on it."""

    body: Body
    own: TenantModel

    @classmethod
    def of(
        cls, body: Body, adapter: Adapter | None, head: Head | None, device: torch.device, embedding: Embedding | None = None
    ) -> TunedModel:
        return cls(body.to(device).eval().requires_grad_(False), TenantModel.of(adapter, head, embedding).to(device))

    @classmethod
    def of_checkpoint(cls, found: Finetuned, device: torch.device) -> TunedModel:
        return cls(*found.loaded(device))

    @classmethod
    def of_tenant(cls, store: Store, tenant: TenantVersion, device: torch.device) -> TunedModel:
        found = store.knowledge(tenant)
        return cls.of(PlotBody.of(store), found.adapter, found.head, device, found.embedding)

    def through(self, pack: Pack) -> tuple[list[Tensor], Tensor]:
        """Returns the states after each upper layer, and the logits."""
        states = self.own.states(self.body, pack)[1:]
        return states, self.own.read(self.own.read_of(states[-1], pack))

    def rows(self, data: Data) -> list[Rows]:
        """Returns the answers to `data.dev`."""
        return data.rows(data.dev, logits_of(self.body, self.own, data, data.dev))


def import_checkpoint(
    store: Store, tenant_id: str, folder: Path, family: Family, texts: UnlabelledTexts, options: ImportOptions,
    matching: Matching, device: torch.device,
) -> tuple[TenantVersion, dict[str, Any]]:  # fmt: skip
    """Returns the stored tenant and its report. The same call after an interruption goes on, and then changes nothing.

    Raises `Unlike` if too few answers are the checkpoint's.
    """
    started, layout = time.perf_counter(), lora_of(matching, store.config)
    with locked_tenant(store, tenant_id):
        domain = options.domain, store.latest(options.domain)
        numbers = {name: value for name, value in asdict(matching).items() if name != "least"}
        asked = {
            "domain": domain[0], "domain_version": domain[1], "tables": store.chain_digest(*domain),
            "checkpoint": digest(folder), "labels": options.labels, "task": options.task, "texts": texts.digest, **numbers,
        }  # fmt: skip
        before = store.tenant(tenant_id)
        step = Step(store, tenant_id, "import", asked)
        if (stored := step.done()) is not None:
            removed_by = f"`hplm tenant delete {tenant_id} --store {store.folder}`"
            _check_agreement(stored, folder, matching, f"it is stored: give a lower --least, or remove it by {removed_by}")
        if before is not None and stored is not None and options.test is None:
            return before, stored
        refused = Refused.of(store, tenant_id)
        if (kept := refused.read(step.inputs, folder)) is not None:
            _check_agreement(kept[0], folder, matching)
        found = family.read(folder, options.labels, options.task)
        before, tested = checked(store, tenant_id, found.head.task, found.labels, options.test)
        if before is not None:
            found = found.with_labels(before.labels)
        task, labels, own = training_task(found.head.task).of(found.embedding), found.labels, (device, found.embedding)
        teacher, reader = TunedModel.of_checkpoint(found, device), Reader(store, *domain)

        def scores(tenant: TunedModel) -> dict[str, Any]:
            return compared(tenant, teacher, tested, reader, labels, task) if tested is not None else {}

        if before is not None and stored is not None:  # only its scores are new
            return before, stored | scores(TunedModel.of_tenant(store, before, device))
        if kept is not None:
            report, (adapter, head) = kept
            assert adapter is not None  # its rank is not 0
            tenant = TunedModel.of(PlotBody.of(store), (layout, adapter), found.head_of(head), *own)
            report |= scores(tenant)
        else:
            refused.remove()  # of another checkpoint, or of other options
            parts = texts.divided(reader, task.unlabelled(), labels, matching.most_texts, matching.seed)
            data = Data(reader, task.unlabelled(), labels, *parts, device)
            saving = step.folder()
            change, held = family.change(found, layout)
            tenant = TunedModel.of(PlotBody.of(store), (layout, change), found.head_of(found.head.weights), *own)
            report = {
                "task": found.head.task,
                "imported": origin_of(store, folder, "transformers", store.model) | found.noted,
                "asked": step.inputs,
                "note": NOTE,
                "distance": round(found.distance, 4),
                "change_held": round(held, 4),
                "root_explained": store.explained(),
                **_matched(tenant, teacher, data, matching, saving / SAVED),
                **scores(tenant),
                "bytes": {"checkpoint": size(folder), "tenant": layout.weight_bytes + found.head_bytes},
            }
            report["took"] = round(time.perf_counter() - started, 1)
            try:
                _check_agreement(report, folder, matching)
            except Unlike:
                refused.keep(report, tenant.own)
                step.clear()
                raise
        version = before.version + 1 if before else 1
        file = TenantVersion(tenant_id, version, *domain, found.head.task, labels, rank=0, head_function=found.head.function)
        file = replace(file.with_adapter(layout), embedding=found.embedding)

        def draw(picture: Path) -> None:
            title = f"{tenant_id} version {file.version}: {file.task} on {file.domain}, from {folder.name}"
            draw_learning(report, "agreement", title, picture)
            import_page(report, title, picture)

        store.chain(*domain)  # fails if the domain was deleted meanwhile
        step.finish(report, lambda report: store.save_tenant(file, *tenant.own.stored(), report, draw))
        refused.remove()
        return file, report


def _check_agreement(
    report: dict[str, Any], folder: Path, matching: Matching, way_out: str = "a lower --least stores it at once"
) -> None:
    after = report["after"]
    if after["agreement"] < matching.least:
        found = f"{after['agreement']:.1%} (+- {after['off']:.1%})"
        said = f"{found} of {after['answers']:,} answers are those of {folder}"
        if report["task"] == EMBED:
            said = f"the cosines of {after['answers']:,} vectors with those of {folder} are {found} in the mean"
        raise Unlike(f"{said}, less than --least {matching.least:g}: {advice(report)}; {way_out}", report)


def _matched(tenant: TunedModel, teacher: TunedModel, data: Data, options: Matching, saved: Path) -> dict[str, Any]:
    """Trains adapter and head. Returns the part of the report that says how near they came."""
    wanted = teacher.rows(data)
    with torch.no_grad():
        some = next(packed_batches(data.dev.lengths, rng=np.random.default_rng(0)))
        states, logits = teacher.through(data.reader.pack(data.dev, some, data.device))
    variances = [float(state.float().var(0, unbiased=False).mean()) for state in states]
    spread = float(logits.float().std()) or 1.0
    epochs = Epochs(data.batches(options.epochs, options.batch_texts, options.seed), options.epochs, DOUBT)
    states_of = taught(lambda pack: teacher.through(pack)[0], data, saved.parent)

    def loss_of(chosen: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, chosen, data.device)
        with torch.no_grad():
            states = states_of(chosen, pack)
            logits = teacher.own.read(teacher.own.read_of(states[-1], pack))
        own, answers = tenant.through(pack)
        pairs = zip(own, states, variances, strict=True)
        apart = [F.mse_loss(mine.float(), theirs.float()) / variance for mine, theirs, variance in pairs]
        return torch.stack(apart).mean() + data.task.apart(answers, logits, spread), len(chosen)

    def examined() -> Exam:
        now = agreement(data, tenant.rows(data), wanted)
        return Exam(now.share, 1 - now.share if now.divergence is None else now.divergence, now.error)

    learned = ParameterGroup(options.learning_rate, dict(tenant.own.named_parameters()))
    training = Training(
        "matching", data.device, [learned], epochs.starting, loss_of, examined, "Use a smaller --learning-rate",
        betas=(0.9, 0.999),
    )  # fmt: skip
    now = train(training, epochs, saved)
    tenant.own.round_to_storage()
    own = tenant.rows(data)
    return {
        "texts": {"learned": len(data.train.examples), "judged": len(wanted), "windows_found": data.dev.window_shares},
        "before": now.exams[0]["score"],
        "after": agreement(data, own, wanted).described(),
        "differing": differing(data, own, wanted),
        **now.reported(),
    }


def answers_of(
    models: Sequence[TunedModel], examples: Sequence[Example], reader: Reader, labels: list[str], task: TrainingTask
) -> tuple[Data, list[list[Rows]]]:
    """Returns each model's answers to other texts, and the texts as data."""
    texts = reader.read(examples, task, labels)
    data = Data(reader, task, labels, texts, texts, next(models[0].body.parameters()).device)
    return data, [model.rows(data) for model in models]


def compared(
    tenant: TunedModel, teacher: TunedModel, examples: Sequence[Example], reader: Reader, labels: list[str], task: TrainingTask
) -> dict[str, Any]:
    """Returns the scores of both on labelled texts, and how many answers are the same."""
    data, rows = answers_of((tenant, teacher), examples, reader, labels, task)
    answers = [[one.labels for one in task.answers(labels, examples, own)] for own in rows]
    scores = [task.score(labels, examples, own).described() for own in answers]
    return {"test": dict(zip(("tenant", "checkpoint"), scores, strict=True)), "tested": agreement(data, *rows).described()}
