"""Builds a tenant: an adapter and a head on a domain's tables, trained on labelled data, with a report of its mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from builder.console import say
from builder.importing.checkpoint import digest
from builder.learning.bodies import PlotBody
from builder.page import tenant_page
from builder.pictures import draw_learning
from builder.store.resumable import clear_work_folder, saved_plan
from builder.store.step import Step
from builder.store.store import Store, TenantVersion, check_name
from builder.tables.build_folder import locked_tenant
from builder.tables.text_files import digest_of_files
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.examples import Example
from builder.tasks.labels import check_answers, head_labels
from builder.tasks.lookup import Reader
from builder.tasks.scores import by_label, confusion
from builder.tasks.tasks import TrainingTask, training_task
from builder.training.data import Data, read_data
from builder.training.finetuning import Train, Trained, TrainingOptions, adapter_of, finetune, logits_of, reported
from builder.training.generating import PromptReader, WrittenData
from builder.training.quality import described, doubts
from builder.training.start import ANEW, check_form, chosen_embedding, chosen_start, form_of
from builder.training.teachers import taught_by, teacher_folder
from hplm.errors import InvalidInput, some
from hplm.model.config import BackboneConfig
from hplm.tasks.tasks import GENERATE, check_backbone

WORST, SHOWN = 10, 300  # mistakes, and characters of each text


def build_tenant(
    store: Store, tenant_id: str, domain: str | None, task: str | None, train_file: Path, dev_file: Path | None = None,
    *, device: torch.device, from_version: int | None = None, trainer: Train = finetune,
    teacher: str | None = None, columns: Columns = AS_TRAINED, new_labels: bool = False, **training: Any,
) -> TenantVersion:  # fmt: skip
    """Trains a tenant, or its next version if it exists, and stores it with its report; `training`: `TrainingOptions`.

    A next version has the domain, task, adapter and head of the one before, unless others are given. `from_version`: the
    version to train on, or ANEW; without it, `chosen_start` chooses. The same call after an interruption continues, and
    ends with the same bytes. After it has ended, the same call changes nothing, except with ANEW. `teacher`: a checkpoint.
    `columns`: default: those of the version before. `new_labels`: the data may have labels that it lacks.
    """
    with locked_tenant(store, tenant_id):
        before = store.tenant(tenant_id)
        task = chosen_task(store.config, tenant_id, before, task)
        check_backbone(task, store.config)
        domain = domain or (before.domain if before is not None else "root")
        own = training_task(task)  # refuses unknown tasks
        if before is not None:
            columns = columns.after(store.report(before))
            check_answers(before, task, before.labels)  # before a line of the data is read as one of another task
        options, taught = checked_options(store, task, before, training), dict[str, str]()
        generates = own.served.generates
        if not own.served.has_head and (teacher is not None or not options.rank):
            raise InvalidInput(f"tenant {tenant_id!r} has no head and learns only an adapter: give --rank, and no --teacher")
        checkpoint = teacher_folder(teacher) if teacher is not None else None
        if checkpoint is not None:
            taught["teacher"] = digest(checkpoint)
        stands_on = domain, store.latest(domain)
        asked = {
            "domain": domain, "domain_version": stands_on[1], "tables": store.chain_digest(*stands_on), "task": task,
            "training": digest_of_files(train_file), "dev": digest_of_files(dev_file) if dev_file is not None else None,
            **reported(options), "places": options.worked_on(store.config), **taught,
            **({"columns": columns.given} if columns.given else {}),
        }  # fmt: skip
        step = Step(store, tenant_id, "training", asked)
        if before is not None and step.done(partial(_is_meant, step, before.version, from_version)) is not None:
            say(f"tenant {tenant_id}: version {before.version} has learned these data with these options; --fresh trains anew")
            return before
        if from_version is None and step.saved_plan is not None and step.inputs.items() <= step.saved_plan.items():
            start = step.saved_plan["from_version"]
        else:
            start = chosen_start(store, tenant_id, before, asked["training"], from_version)
        learned = store.tenant_version(tenant_id, start) if start != ANEW else None
        if learned is not None:
            check_form(learned, options, store.config)
        if checkpoint is not None:
            examples = own.read(train_file, columns)
            labels = head_labels(before, task, examples, own.labels(examples), learned is not None, new_labels)
            trainer = taught_by(checkpoint, taught["teacher"], store, tenant_id, task, labels)
        reader = (PromptReader if generates else Reader)(store, *stands_on)
        files = train_file, dev_file
        data = read_data(
            reader, task, *files, device, before, options.dtype, learned, columns=columns, embedding=options.embedding,
            new_labels=new_labels,
        )  # fmt: skip
        if before is not None and (new := _behind(data.labels, before)):
            say(f"tenant {tenant_id}: new labels, which version {before.version} does not have: {new}")
        version = before.version + 1 if before else 1
        saving = step.folder(from_version=start, free={"version": version})  # an import may have taken the number since
        body = PlotBody.of(store)
        if generates:
            data = WrittenData.of(data, body.upper.next_token.weight)
        trained = trainer(body, data, options, saving / "learning.pt")
        tenant = TenantVersion(
            tenant_id, version, *stands_on, task, data.labels, options.rank, options.adapter,
            options.worked_on(store.config), options.function, options.head_function, options.dtype, options.embedding,
        )  # fmt: skip
        store.chain(*stands_on)  # fails if the domain was deleted meanwhile: the report reads its table
        report = {"task": task, "from_version": start, **_report(asked, files, data, trained)}
        report["warnings"] = doubts(data)
        if not report["kept_epoch"]:
            kept = f"every epoch made the dev score worse, so the weights are those of version {start}"
            new = _behind(data.labels, learned) if learned is not None else ""
            report["warnings"].append(kept + f", which never answers {new}" * bool(new))
        adapter, head = trained.model.stored()
        size = sum(part.nbytes for weights in (*(adapter or ()), head) for part in weights.values())
        report["bytes"] = size

        def draw(picture: Path) -> None:
            title = f"{tenant_id} version {tenant.version}: {task} on {domain}"
            draw_learning(report, trained.scores.metric, title, picture)
            tenant_page(report, title, picture)

        store.chain(*stands_on)
        step.finish(report, lambda report: store.save_tenant(tenant, adapter, head, report, draw, data.seen))
        return tenant


def chosen_task(config: BackboneConfig, tenant_id: str, before: TenantVersion | None, task: str | None) -> str:
    usual = before.task if before is not None else GENERATE if config.is_decoder else None
    if (task := task or usual) is None:
        raise InvalidInput(f"tenant {tenant_id!r} is new: give its --task")
    return task


def checked_options(store: Store, task: str, before: TenantVersion | None, training: dict[str, Any]) -> TrainingOptions:
    """Returns the options of a training, and refuses wrong ones before anything is removed. `before`: the version before."""
    own = {name: value for name, value in training.items() if name != "embedding"}
    embedding = chosen_embedding(task, before, store.config, training.get("embedding") or {})
    options = TrainingOptions(**form_of(before, own), embedding=embedding)
    if options.body_rate and not options.cut:
        raise InvalidInput("--upper-rate needs an adapter that holds the change of the upper layers: give --rank above 0")
    adapter_of(store.config, options)  # unknown projections and kinds
    return options


def delete_tenant(store: Store, tenant_id: str) -> list[int]:
    """Deletes all versions of a tenant, and returns them. Refuses while a training of it is running or was interrupted."""
    check_name("tenant", tenant_id)
    versions = store.tenant_versions(tenant_id)
    if not versions:
        raise store.unknown(tenant_id)
    with locked_tenant(store, tenant_id) as working:
        for folder in working.iterdir():
            if saved_plan(folder) is not None:
                raise InvalidInput(
                    f"a training of tenant {tenant_id!r} was interrupted in {folder}: finish it by its command, or remove it"
                )
        store.remove_tenant(tenant_id)
        clear_work_folder(working)
    return versions


def _report(inputs: dict[str, Any], files: tuple[Path, Path | None], data: Data, trained: Trained) -> dict[str, Any]:
    training = {"file": str(files[0].resolve()), "digest": inputs["training"]}
    dev = {"file": str(files[1].resolve()), "digest": inputs["dev"]} if files[1] is not None else training
    return {
        "training": {**training, **described(data.train)},
        "dev": {**dev, **described(data.dev), **trained.scores.described()},
        **mistakes_of(trained, data),
        **trained.report,
    }


def _is_meant(step: Step, version: int, wanted: int | None, report: dict[str, Any]) -> bool:
    """Returns whether a command with `wanted` asks for the version that has this report and number."""
    if wanted == ANEW:  # trains again, unless it was interrupted after it had stored its tenant
        return step.saved_plan == {"version": version, "from_version": ANEW, **step.inputs}
    return wanted in (None, report["from_version"])


def _behind(labels: Sequence[str], before: TenantVersion) -> str:
    """Names the labels that a version before does not have; "" if there are none."""
    return some([*map(repr, labels[len(before.labels) :])])


def mistakes_of(trained: Trained, data: Data) -> dict[str, Any]:
    """Returns the part of a report that counts right and wrong answers by label, and shows those with the largest loss."""
    task, texts = data.task, data.dev
    logits = logits_of(trained.body, trained.model, data, texts)
    losses = [
        float(task.loss(torch.from_numpy(own), torch.from_numpy(text.targets), [len(own)], 1.0)[0]) / max(1, len(own))
        for own, text in zip(logits, texts.texts, strict=True)
        if text.window == 0
    ]
    examples, answers = texts.examples, data.answers(texts, logits)
    worst = []
    for number in sorted(range(len(answers)), key=lambda number: -losses[number]):
        right = _right(task, examples[number])
        shown_ones = answers[number][:1] if task.served.is_vector else answers[number]
        answer = ", ".join(shown_ones if task.one_label_a_row else sorted(shown_ones))
        if answer not in right and len(worst) < WORST:
            worst.append({"text": shown(examples[number]), "right": _cut(right[0]), "answered": _cut(answer)})
    known: list[dict[str, Any]] = []
    if task.served.has_head and not task.served.fixed_labels:
        known = by_label(data.labels, examples, answers, task.one_label_a_row)
    confused = {"confusion": confusion(examples, answers)} if task.one_label_a_row else {}
    return {"by_label": known, **confused, "mistakes": worst}


def shown(example: Example) -> str:
    return _cut(example.text if example.pair is None else f"{example.text} | {example.pair}")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _right(task: TrainingTask, example: Example) -> list[str]:
    """Returns every right answer as a text."""
    if task.served.generates:
        return [example.target]
    if task.served.is_number or example.is_rated:
        return [f"{example.value:g}"]
    if task.served.is_vector:
        return [example.pair or ""]
    if task.served.needs_pair:
        return [(example.pair or "")[start:stop] for start, stop in example.answers] or [""]
    return [", ".join(example.labels if task.one_label_a_row else sorted(example.labels))]
