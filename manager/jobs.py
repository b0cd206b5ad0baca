"""Fine-tuning jobs: reads OpenAI's request, tells OpenAI's object, and knows the commands that do a job."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hplm.clock import Clock
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import Given, check_no_other, choice, flag, shown, whole
from manager.children import PROGRESS
from manager.models import NOT_FOUND, Base, Models, Served, score_of
from manager.records import DAY, Event, File, Job, Records
from manager.rights import Rights
from manager.uploads import DATA, TRAINS, Uploads

AUTO = "auto"
SUFFIX = re.compile(r"[a-z0-9][a-z0-9_-]{0,29}")  # without a dot: names of candidates have one more
LONGEST_METADATA = (16, 64, 512)  # entries, and characters of a name and of a value, as OpenAI has it
USUAL_RATE, BEST_RATE = 2e-3, 1e-3  # learning rates of `hplm build tenant`, without --best and with it
PROMOTES = ("better", "never", "always")
LONGEST_PROGRESS = 10_000  # bytes that are read
CHECKPOINT = "checkpoint"  # the folder of an import's files, in its job's
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"  # of a checkpoint, and of an adapter
# Names of files that an import reads. An index of many files is not among them: it could name files of others.
IMPORTED = re.compile(
    r"(adapter_)?config\.json|(adapter_)?model\.safetensors|tokenizer(_config)?\.json|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|[a-z][a-z0-9._-]{0,60}\.model"
)
MOST_IMPORTED = 32  # files
NOT_OF_IMPORTS = ("best", "fresh", "from_version", "new_labels", "learning_rate_multiplier")
DATA_FILES = ("training_file", "validation_file")
HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")


class Jobs:
    def __init__(
        self, records: Records, rights: Rights, uploads: Uploads, models: Models, folder: Path, clock: Clock = time
    ) -> None:
        self._records, self._rights, self._uploads, self._models = records, rights, uploads, models
        self._folder, self._clock = folder, clock

    def create(self, owner: str, who: str, given: Given) -> Job:
        """Takes a request for a job. Raises if it is wrong, or beyond the owner's limits."""
        given = dict(given)
        model, suffix = given.pop("model", None), given.pop("suffix", None)
        files = [given.pop(name, None) for name in DATA_FILES]
        if given.pop("integrations", []):
            raise wrong("'integrations' are not supported: leave them out", "integrations")
        wishes = _wishes(given)
        check_no_other(given)
        base, tenant, domain, live = self._place(owner, model, suffix)
        wishes |= {"model": model, "goes_on": live is not None, "who": f"manager {who}"}
        versions, start = base.versions(tenant), wishes["from_version"]
        if wishes["import"] and live is not None:
            domain = live.tenant.domain
        elif live is not None and not wishes["fresh"] and start is None and versions[-1:] != [live.stored]:
            wishes["from_version"] = live.stored  # what is served, and not a candidate after it
        elif start is not None and (live is None or start not in versions):
            raise wrong(f"'from_version' is {start}: name a model of yours as 'model', and a version that it has", "hplm")
        now = self._clock.time()
        job = Job(f"ftjob-{secrets.token_hex(12)}", owner, int(now), tenant, base.name, domain, "", None, wishes)
        with self._records.together():
            train, dev = (self._data(owner, id, name) for id, name in zip(files, DATA_FILES, strict=True))
            if wishes["import"]:
                self._check_import(owner, wishes, train, dev)
            elif train is None:
                raise wrong("'training_file' is missing: upload one by POST /v1/files, and give its id", "training_file")
            self._check_limits(owner, tenant, now)
            job = replace(job, training_file=train or "", validation_file=dev)
            self._records.add(job)
            self._records.tell(job.id, "created", f"Created fine-tuning job: {job.id}")
            self._records.note(who, owner, "job create", job=job.id, model=tenant)
        return job

    def found(self, owner: str, id: str) -> Job:
        job = self._records.get(Job, id)
        if job is None or job.owner != owner:
            raise Refused(404, f"no such job: {shown(id)}", param="id")
        return job

    def folder(self, job: Job) -> Path:
        return self._folder / job.id

    def base(self, job: Job) -> Base:
        return self._models.bases[job.backbone]

    def file(self, job: Job, is_dev: bool = False) -> Path | None:
        id = job.validation_file if is_dev else job.training_file
        file = self._records.get(File, id) if id is not None else None
        return self._uploads.path(file) if file is not None else None

    def checking(self, job: Job) -> list[object]:
        """Returns the command that looks for faults of the data, or of a checkpoint."""
        if job.wishes["import"]:
            return [*self._importing(job), "--plan"]
        return ["check", *self._given(job)]

    def building(self, job: Job, device: str) -> list[object]:
        """Returns the command that trains. Whoever gives it by hand gets the same bytes."""
        wishes, more = job.wishes, list[object]()
        if wishes["import"]:
            epochs = ["--epochs", wishes["n_epochs"]] if wishes["n_epochs"] is not None else []
            least = ["--least", wishes["least"]] if wishes["least"] is not None else []
            return [*self._importing(job), *epochs, *least, "--seed", wishes["seed"], "--device", device]
        if wishes["best"]:
            more.append("--best")
        if (multiplier := wishes["learning_rate_multiplier"]) is not None:
            more += ["--learning-rate", (BEST_RATE if wishes["best"] else USUAL_RATE) * multiplier]
        if wishes["n_epochs"] is not None:
            more += ["--epochs", wishes["n_epochs"]]
        return ["build", "tenant", *self._given(job), *more, "--seed", wishes["seed"], "--device", device]

    def _given(self, job: Job) -> list[object]:
        """Returns the options of both."""
        base, wishes, dev = self.base(job), job.wishes, self.file(job, is_dev=True)
        words: list[object] = ["--id", job.tenant, "--store", base.store, "--train", self.file(job)]
        words += ["--dev", dev] if dev is not None else []
        words += ["--task", task] if (task := job.task or wishes["task"]) is not None else []
        words += ["--domain", job.domain] if job.domain is not None else []
        if wishes["fresh"] or (not wishes["goes_on"] and base.versions(job.tenant)):
            words.append("--fresh")
        elif wishes["from_version"] is not None:
            words += ["--from-version", wishes["from_version"]]
        return [*words, *["--new-labels"] * wishes["new_labels"]]

    def _importing(self, job: Job) -> list[object]:
        base, texts, task = self.base(job), self.file(job), job.wishes["task"]
        words: list[object] = ["import", "--from", self.checkpoint(job), "--id", job.tenant, "--store", base.store]
        words += ["--domain", job.domain] if job.domain is not None else []
        words += ["--texts", texts] if texts is not None else []
        return [*words, *(["--task", task] if task is not None else [])]

    def checkpoint(self, job: Job) -> Path:
        return self.folder(job) / CHECKPOINT

    def lay_out(self, job: Job) -> None:
        """Lays the files of an import under their names into a folder of the job."""
        folder = self.checkpoint(job)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
        for id in job.wishes["import"]:
            file = self._records.get(File, id)
            assert file is not None, "a job needs it"
            os.link(self._uploads.path(file), folder / file.name)

    def chosen_name(self, job: Job, version: int) -> tuple[str, str]:
        """Returns under which name a job's version is to be served, and why: the tenant's own, or a candidate's."""
        waits, wish = f"{job.tenant}.v{version}", job.wishes["promote"]
        live = next((one for one in self._models.served(job.owner) if one.tenant.id == job.tenant), None)
        if live is not None and live.stored == version:
            return job.tenant, "the same data and settings have made it, and it is served already"
        if wish != PROMOTES[0]:
            return (job.tenant if wish == "always" else waits), f"the job's 'promote' is {wish!r}"
        if live is None:
            return job.tenant, "it is the first one"
        base, own = self.base(job), self.base(job).report(job.tenant, version)
        mine, start = score_of(own), own.get("at_start", {}).get("dev")
        if start is None:  # it has not started from another one
            before = base.report(job.tenant, live.stored)
            is_same = before.get("dev", {}).get("digest") == own.get("dev", {}).get("digest")
            start = score_of(before).get("score") if is_same else None
        if not mine or start is None:
            return waits, f"there is no score of version {live.stored} on the same dev texts"
        doubt = (max(0.0, mine["score"] * (1 - mine["score"])) / max(1, own["dev"].get("rows", 1))) ** 0.5
        said = f"{mine['metric']} {mine['score']:.3f} after {start:.3f} on the same dev texts, standard error {doubt:.3f}"
        return (job.tenant if mine["score"] >= start - doubt else waits), said

    def readable(self, job: Job, text: str) -> str:
        """Returns what a command has said with an owner's names of files, and without paths of this machine."""
        for id in (job.training_file, job.validation_file):
            if id is not None and (file := self._records.get(File, id)) is not None:
                path = self._uploads.path(file)
                text = text.replace(str(path), file.name).replace(path.name, file.name)
        if job.wishes["import"]:
            text = text.replace(str(self.checkpoint(job)), "the checkpoint")
            text = text.replace("give --texts FILE", "give a 'training_file' of texts like those that it will get")
            text = text.replace("--least", "'least'")
        return text.replace(str(self.base(job).store), "the store").replace(str(self._folder), "the manager")

    def _place(self, owner: str, model: Any, suffix: Any) -> tuple[Base, str, str | None, Served | None]:
        """Returns the base, the tenant, its domain if the request names one, and what is served of a tenant that it names."""
        if not isinstance(model, str):
            raise wrong("'model' is missing: name a base or one of your models, such as GET /v1/models lists", "model")
        name, _, domain = model.partition("/")
        if (base := self._models.bases.get(name)) is None:
            live = self._models.find(owner, model)
            if live.candidate_of is not None:
                raise wrong(f"{model!r} waits to be promoted: name {live.candidate_of!r}, with 'from_version'", "model")
            if suffix is not None:
                raise wrong(f"{model!r} has a name already: leave out 'suffix'", "suffix")
            self._check_domain(live.base, live.tenant.domain)
            return live.base, model, None, live
        if suffix is not None and not (isinstance(suffix, str) and SUFFIX.fullmatch(suffix)):
            form = "1-30 lower-case letters, digits, '_' and '-', no leading sign"
            raise wrong(f"'suffix' is {shown(suffix)}: use {form}", "suffix")
        if domain and domain not in base.domains():
            raise Refused(404, NOT_FOUND, "model_not_found", "model")
        self._check_domain(base, domain or "root")
        tenant = f"{owner}.{suffix}" if suffix is not None else owner
        for other in self._models.with_tenant(tenant):
            if other is not base or all(mine.tenant.id != tenant for mine in self._models.served(owner)):
                raise Refused(409, f"there is another model {tenant!r}: choose another 'suffix'", param="suffix")
        return base, tenant, domain or None, None

    @staticmethod
    def _check_domain(base: Base, domain: str) -> None:
        if not base.domains().get(domain, False):
            raise Refused(409, f"the newest version of {base.name}/{domain} is not served: ask an operator", param="model")

    def _data(self, owner: str, id: Any, name: str) -> str | None:
        """Returns the id of a file of labelled data."""
        if id is None:
            return None
        file = self._uploads.found(owner, id) if isinstance(id, str) else None
        if file is None or file.purpose != TRAINS:
            raise wrong(f"{name!r} is {shown(id)}: give the id of a file with the purpose {TRAINS!r}", name)
        return file.id

    def _check_import(self, owner: str, wishes: dict[str, Any], train: str | None, dev: str | None) -> None:
        """Refuses files that make no checkpoint by their names, and wishes that an import does not have."""
        names = set[str]()
        for id in wishes["import"]:
            file = self._uploads.found(owner, id)
            if file.purpose != DATA:
                raise wrong(f"'import' has {shown(id)}: give ids of files with the purpose {DATA!r}", "hplm")
            if not IMPORTED.fullmatch(file.name):
                form = f"{CONFIG}, model.safetensors (or adapter_*) and the tokenizer's files, in no folder"
                raise wrong(f"'import' has the file {shown(file.name)}: bring only {form}", "hplm")
            if file.name in names:
                raise wrong(f"'import' has two files {file.name!r}: leave one out", "hplm")
            names.add(file.name)
        if not names & {CONFIG, ADAPTER_CONFIG}:
            raise wrong(f"'import' has no {CONFIG} and no {ADAPTER_CONFIG}: upload the one that your library saved", "hplm")
        if train is not None and ADAPTER_CONFIG in names:
            raise wrong("an adapter learns nothing when it is imported: leave out 'training_file'", "training_file")
        given = [name for name in NOT_OF_IMPORTS if wishes[name]] + ["validation_file"] * (dev is not None)
        if given:
            raise wrong(f"'import' stands beside {given[0]!r}, which an import does not have: leave it out", given[0])

    def _check_limits(self, owner: str, tenant: str, now: float) -> None:
        def limit(name: str) -> int:
            return self._rights.limit(owner, name)

        if self._records.jobs_since(owner, now - DAY) >= (jobs := limit("jobs_a_day")):
            raise _full(f"{jobs} jobs were created in 24 hours, which is your limit: try again later")
        if self._records.seconds_since(owner, now - DAY) >= 60 * (minutes := limit("minutes_a_day")):
            raise _full(f"your jobs have computed for {minutes} minutes in 24 hours, your limit: try again later")
        own = {one.candidate_of or one.tenant.id for one in self._models.served(owner)}
        own |= {job.tenant for job in self._records.unended(owner)}
        if tenant not in own and len(own) >= limit("tenants"):
            raise _full(f"you have {len(own)} models, which is your limit: delete one")

    def told(self, job: Job) -> dict[str, Any]:
        """Returns a job as OpenAI's clients read it. What is only ours is in `hplm`."""
        wishes = job.wishes
        hyper = {name: wishes.get(name) or AUTO for name in HYPERPARAMETERS}
        report = self.base(job).report(job.tenant, job.version) if job.version and job.backbone in self._models.bases else {}
        ours = {
            "step": job.step or None, "tenant": job.tenant, "task": job.task, "version": job.version,
            "served_as": job.served_as, "seconds": round(job.seconds, 1), "progress": self.progress(job),
            "dev": score_of(report) or None, "import": wishes["import"],
            "warnings": [self.readable(job, one) for one in report.get("warnings", [])],
        }  # fmt: skip
        return {
            "id": job.id, "object": "fine_tuning.job", "created_at": job.created, "finished_at": job.finished,
            "model": wishes["model"], "fine_tuned_model": job.served_as if job.status == "succeeded" else None,
            "organization_id": job.owner, "status": job.status, "error": job.error, "training_file": job.training_file,
            "validation_file": job.validation_file, "hyperparameters": hyper,
            "method": {"type": "supervised", "supervised": {"hyperparameters": hyper}}, "seed": wishes["seed"],
            "trained_tokens": None, "result_files": [], "integrations": [], "metadata": wishes["metadata"],
            "estimated_finish": None, "hplm": ours,
        }  # fmt: skip

    def progress(self, job: Job) -> dict[str, Any] | None:
        """Returns how far the command is that runs: what it does, how much is done, and of how much."""
        if not job.step or not (path := self.folder(job) / PROGRESS).exists():
            return None
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LONGEST_PROGRESS))
            lines = file.read().splitlines()
        found = [json.loads(line) for line in lines if line.startswith(b'{"what"') and line.endswith(b"}")]
        return {name: found[-1].get(name) for name in ("what", "done", "of")} if found else None

    def checkpoints(self, job: Job) -> list[dict[str, Any]]:
        """Returns the kept epoch: no other one has weights."""
        if job.version is None or job.status != "succeeded":
            return []
        report = self.base(job).report(job.tenant, job.version)
        score = score_of(report)
        metrics = {"step": report.get("kept_step"), "train_loss": report.get("last_loss")}
        metrics |= {f"valid_{score['metric']}": score["score"]} if score else {}
        return [{
            "id": f"ftckpt-{job.id.partition('-')[2]}", "object": "fine_tuning.job.checkpoint", "created_at": job.finished,
            "fine_tuned_model_checkpoint": job.served_as, "fine_tuning_job_id": job.id, "metrics": metrics,
            "step_number": report.get("kept_step") or 0,
        }]  # fmt: skip


def told_event(event: Event) -> dict[str, Any]:
    return {
        "object": "fine_tuning.job.event", "id": f"ftevent-{event.number}", "created_at": event.at, "level": event.level,
        "message": event.message, "type": "metrics" if event.mark.startswith("exam ") else "message", "data": event.data,
    }  # fmt: skip


def _full(message: str) -> Refused:
    return Refused(429, message, "rate_limit_exceeded", headers={"x-should-retry": "false"})


def _wishes(given: Given) -> dict[str, Any]:
    """Takes what a request says about the training."""
    method, hyper = given.pop("method", None), given.pop("hyperparameters", None)
    if method is not None:
        match method:
            case {"type": "supervised", **more} if not more or [*more] == ["supervised"]:
                own = more.get("supervised") or {}
            case _:
                raise wrong(f"'method' is {shown(method)}: only the type 'supervised' is supported", "method")
        if not isinstance(own, dict) or own.keys() - {"hyperparameters"} or (hyper and own.get("hyperparameters")):
            raise wrong("'method' has more than 'hyperparameters', or they stand beside it too: give them once", "method")
        hyper = own.get("hyperparameters") or hyper
    ours, metadata = given.pop("hplm", None) or {}, given.pop("metadata", None)
    for name, value in (("hyperparameters", hyper or {}), ("hplm", ours)):
        if not isinstance(value, dict):
            raise wrong(f"{name!r} is {shown(value)}: give an object", name)
    hyper = {name: value for name, value in (hyper or {}).items() if value not in (None, AUTO)}
    ours = {name: value for name, value in ours.items() if value is not None}
    _check_metadata(metadata)
    if "batch_size" in hyper:
        raise wrong("'batch_size' is chosen here: leave it out, or give 'auto'", "batch_size")
    rate = hyper.pop("learning_rate_multiplier", None)
    if rate is not None and (type(rate) not in (int, float) or not 1e-3 <= rate <= 1e3):
        said = f"'learning_rate_multiplier' is {shown(rate)}: give a number from 0.001 to 1,000"
        raise wrong(said, "learning_rate_multiplier")
    task = ours.pop("task", None)
    if task is not None and not (isinstance(task, str) and re.fullmatch("[a-z]{1,20}", task)):
        raise wrong(f"'task' is {shown(task)}: give one such as classify", "hplm")
    epochs = _counted(hyper, "n_epochs", 100)
    found = {
        "seed": whole(given, "seed", 0) or 0, "metadata": metadata, "n_epochs": epochs, "learning_rate_multiplier": rate,
        "task": task, "best": flag(ours, "best"), "fresh": flag(ours, "fresh"), "promote": choice(ours, "promote", *PROMOTES),
        "new_labels": flag(ours, "new_labels"), "import": _ids(ours), "least": _least(ours),
        "from_version": whole(ours, "from_version", 1),
    }  # fmt: skip
    if found["least"] is not None and not found["import"]:
        raise wrong("'least' is of imports: leave it out", "hplm")
    if found["fresh"] and found["from_version"] is not None:
        raise wrong("'fresh' stands beside 'from_version': a training begins once, so leave one out", "hplm")
    for left in (hyper, ours):
        check_no_other(left)
    return found


def _ids(given: Given) -> list[str]:
    """Takes the ids of a checkpoint's files; none: it is no import."""
    found = given.pop("import", None)
    if found is None:
        return []
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_IMPORTED or not all(isinstance(id, str) for id in found):
        raise wrong(f"'import' is {shown(found)}: give a list of ids of up to {MOST_IMPORTED} files", "hplm")
    return found


def _least(given: Given) -> float | None:
    found = given.pop("least", None)
    if found is not None and (type(found) not in (int, float) or not 0 <= found <= 1):
        raise wrong(f"'least' is {shown(found)}: give the share of answers that must be the checkpoint's, 0 to 1", "hplm")
    return found


def _counted(given: Given, name: str, most: int) -> int | None:
    value = whole(given, name, 1)
    if value is not None and value > most:
        raise wrong(f"{name!r} is {value:,}: give {most} at most", name)
    return value


def _check_metadata(given: Any) -> None:
    entries, name, value = LONGEST_METADATA
    if given is None:
        return
    is_right = isinstance(given, dict) and len(given) <= entries
    if not is_right or not all(len(key) <= name and isinstance(one, str) and len(one) <= value for key, one in given.items()):
        raise wrong(f"'metadata' is no object of up to {entries} texts, of up to {value} characters each", "metadata")
