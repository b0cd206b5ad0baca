"""Jobs: takes OpenAI's request for one, or an operator's for a domain, and tells OpenAI's object."""

from __future__ import annotations

import json
import re
import secrets
import time
from pathlib import Path
from typing import Any

from hplm.clock import Clock
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import Given, check_no_other, shown
from manager.children import PROGRESS
from manager.domains import Domains
from manager.models import NOT_FOUND, Base, Models, Served, score_of
from manager.records import DAY, DOMAIN, Event, File, Job, Records
from manager.rights import Rights
from manager.uploads import DATA, TRAINS, Uploads
from manager.wishes import AUTO, HYPERPARAMETERS, domain_wishes_in, wishes_in
from manager.work import KINDS, Work

SUFFIX = re.compile(r"[a-z0-9][a-z0-9_-]{0,29}")  # without a dot: names of candidates have one more
LONGEST_PROGRESS = 10_000  # bytes that are read
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"  # of a checkpoint, and of an adapter
# Names of files that an import reads. An index of many files is not among them: it could name files of others.
IMPORTED = re.compile(
    r"(adapter_)?config\.json|(adapter_)?model\.safetensors|tokenizer(_config)?\.json|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|[a-z][a-z0-9._-]{0,60}\.model"
)
NOT_OF_IMPORTS = ("best", "fresh", "from_version", "new_labels", "learning_rate_multiplier")
DATA_FILES = ("training_file", "validation_file")
CORPORA = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")  # endings of corpora


class Jobs:
    def __init__(
        self, records: Records, rights: Rights, uploads: Uploads, models: Models, domains: Domains, folder: Path,
        clock: Clock = time,
    ) -> None:  # fmt: skip
        self._records, self._rights, self._uploads, self._models = records, rights, uploads, models
        self._domains, self._folder, self._clock = domains, folder, clock

    def create(self, owner: str, who: str, given: Given) -> Job:
        """Takes a request for a job. Raises if it is wrong, or beyond the owner's limits."""
        given = dict(given)
        model, suffix = given.pop("model", None), given.pop("suffix", None)
        files = [given.pop(name, None) for name in DATA_FILES]
        if given.pop("integrations", []):
            raise wrong("'integrations' are not supported: leave them out", "integrations")
        wishes = wishes_in(given)
        check_no_other(given)
        base, tenant, domain, live = self._place(owner, model, suffix)
        wishes["goes_on"] = live is not None
        versions, start = base.versions(tenant), wishes["from_version"]
        if wishes["import"] and live is not None:
            domain = live.tenant.domain
        elif live is not None and not wishes["fresh"] and start is None and versions[-1:] != [live.stored]:
            wishes["from_version"] = live.stored  # what is served, and not a candidate after it
        elif start is not None and (live is None or start not in versions):
            raise wrong(f"'from_version' is {start}: name a model of yours as 'model', and a version that it has", "hplm")
        with self._records.together():
            train, dev = (self._data(owner, id, name) for id, name in zip(files, DATA_FILES, strict=True))
            if wishes["import"]:
                self._check_import(owner, wishes, train, dev)
            elif train is None:
                raise wrong("'training_file' is missing: upload one by POST /v1/files, and give its id", "training_file")
            self._check_limits(owner)
            own = {one.candidate_of or one.tenant.id for one in self._models.served(owner)}
            own |= {job.tenant for job in self._records.unended(owner)}
            if tenant not in own and len(own) >= self._rights.limit(owner, "tenants"):
                raise _full(f"you have {len(own)} models, which is your limit: delete one")
            return self._add(owner, who, tenant, base, domain, train or "", dev, {**wishes, "model": model})

    def create_domain(self, owner: str, who: str, given: Given) -> Job:
        """Takes a request for a domain, or for its next version."""
        given = dict(given)
        id, corpus = given.pop("id", None), given.pop("corpus", None)
        wishes = domain_wishes_in(given)
        check_no_other(given)
        base, domain = self._domains.named(id)
        if base.domain_versions(domain) and (fixed := [name for name in ("parent", "min_tokens") if name in wishes["options"]]):
            raise wrong(f"{fixed[0]!r} is of a new domain, and {id!r} is there: leave it out", fixed[0])
        with self._records.together():
            file = self._uploads.found(owner, corpus) if isinstance(corpus, str) else None
            if file is None or file.ending not in CORPORA:
                raise wrong(f"'corpus' is {shown(corpus)}: give the id of a file that ends in {', '.join(CORPORA)}", "corpus")
            self._check_limits(owner)
            return self._add(owner, who, f"{base.name}/{domain}", base, domain, file.id, None, {**wishes, "model": id})

    def _add(
        self, owner: str, who: str, tenant: str, base: Base, domain: str | None, train: str, dev: str | None,
        wishes: dict[str, Any],
    ) -> Job:  # fmt: skip
        id, now = f"ftjob-{secrets.token_hex(12)}", int(self._clock.time())
        job = Job(id, owner, now, tenant, base.name, domain, train, dev, {**wishes, "who": f"manager {who}"})
        self._records.add(job)
        self._records.tell(job.id, "created", f"Created fine-tuning job: {job.id}")
        self._records.note(who, owner, "job create", job=job.id, model=tenant)
        return job

    def found(self, owner: str, id: str) -> Job:
        job = self._records.get(Job, id)
        if job is None or job.owner != owner:
            raise Refused(404, f"no such job: {shown(id)}", param="id")
        return job

    def work(self, job: Job) -> Work:
        """Returns what a job does."""
        ids = [job.training_file, job.validation_file, *job.wishes["import"]]
        files = [file for id in ids if id and (file := self._records.get(File, id)) is not None]
        named = {file.id: (self._uploads.path(file), file.name) for file in files}
        return KINDS[job.kind](job, self._models, self._folder / job.id, named)

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
        self._models.check_free(owner, tenant, base, "suffix")
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

    def _check_limits(self, owner: str) -> None:
        then = self._clock.time() - DAY
        if self._records.jobs_since(owner, then) >= (jobs := self._rights.limit(owner, "jobs_a_day")):
            raise _full(f"{jobs} jobs were created in 24 hours, which is your limit: try again later")
        if self._records.seconds_since(owner, then) >= 60 * (minutes := self._rights.limit(owner, "minutes_a_day")):
            raise _full(f"your jobs have computed for {minutes} minutes in 24 hours, your limit: try again later")

    def told(self, job: Job) -> dict[str, Any]:
        """Returns a job as OpenAI's clients read it. What is only ours is in `hplm`."""
        wishes = job.wishes
        hyper = {name: wishes.get(name) or AUTO for name in HYPERPARAMETERS}
        work = self.work(job) if job.backbone in self._models.bases else None
        report = work.report() if work is not None else {}
        ours = {
            "kind": job.kind, "step": job.step or None, "tenant": job.tenant if job.kind != DOMAIN else None,
            "domain": job.domain, "task": job.task, "version": job.version, "served_as": job.served_as,
            "seconds": round(job.seconds, 1), "progress": self.progress(job), "dev": score_of(report) or None,
            "import": wishes["import"], "warnings": [work.readable(one) for one in report.get("warnings", []) if work],
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
        if not job.step or not (path := self._folder / job.id / PROGRESS).exists():
            return None
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LONGEST_PROGRESS))
            lines = file.read().splitlines()
        found = [json.loads(line) for line in lines if line.startswith(b'{"what"') and line.endswith(b"}")]
        if not found:
            return None
        return {"what": self.work(job).readable(found[-1]["what"]), **{name: found[-1].get(name) for name in ("done", "of")}}

    def checkpoints(self, job: Job) -> list[dict[str, Any]]:
        """Returns the kept epoch: no other one has weights."""
        if job.kind == DOMAIN or job.status != "succeeded":
            return []
        report = self.work(job).report()
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
