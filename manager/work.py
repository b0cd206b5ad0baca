"""Gives the commands of a job by its kind: it makes a tenant of labelled data, a tenant of a checkpoint, or a domain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manager.models import Base, Models, score_of
from manager.records import DOMAIN, IMPORT, TRAINING, Job
from manager.wishes import DOMAIN_OPTIONS, PROMOTES

USUAL_RATE, BEST_RATE = 2e-3, 1e-3  # learning rates of `hplm build tenant`, without --best and with it
CHECKPOINT = "checkpoint"  # the folder of an import's files, in its job's
Words = list[object]  # a command of hplm


@dataclass(frozen=True)
class Checked:
    """A check of a job's data, which has found no fault."""

    said: str
    task: str | None = None
    labels: int = 0
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Work:
    """A job and where its things are."""

    job: Job
    models: Models
    folder: Path  # of the job
    files: Mapping[str, tuple[Path, str]]  # where each file lies, and its owner's name for it, by id

    fault = "invalid_training_file", "training_file"  # the code and the field of an error

    @property
    def base(self) -> Base:
        return self.models.bases[self.job.backbone]

    @property
    def data(self) -> dict[str, Path]:
        """Files of texts, by the field that names them."""
        ids = {"training_file": self.job.training_file, "validation_file": self.job.validation_file}
        return {name: self.files[id][0] for name, id in ids.items() if id in self.files}

    @property
    def what(self) -> str:
        return f"training file: {self.job.training_file}"

    def begin(self) -> None:
        """Does what must be done before each command."""

    def checking(self) -> Words:
        """Returns the command that looks for faults of the data; empty: nothing does."""
        return []

    def faults(self, found: dict[str, Any]) -> list[str]:
        """Returns the faults that a result of `checking` tells."""
        return found.get("faults", [])

    def checked(self, found: dict[str, Any]) -> Checked:
        """Reads a result of `checking` without faults; an empty one if there is no such command."""
        raise NotImplementedError

    def building(self, device: str) -> Words:
        """Returns the command that builds. Whoever gives it by hand gets the same bytes."""
        raise NotImplementedError

    def built(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields what there is to say of a build's result: the level and the message."""
        return iter(())

    def versions(self) -> list[int]:
        """Returns the versions that are in the store, oldest first."""
        raise NotImplementedError

    def held(self) -> Path:
        """Returns the folder that the builder holds while it builds."""
        raise NotImplementedError

    def remains(self) -> list[Path]:
        """Returns what a build leaves that has not ended."""
        return [self.held()]

    def chosen_name(self, version: int) -> tuple[str, str]:
        """Returns under which name a version is to be served, and why."""
        return self.job.tenant, "it is the newest one"

    def publishing(self, version: int, name: str) -> Words:
        """Returns the command that serves a version, which changes nothing the second time; empty: it is served."""
        raise NotImplementedError

    def published(self, version: int, name: str) -> None:
        """Does what follows a publication."""

    def ended(self, name: str) -> str:
        """Says what there is now."""
        return f"ask the model {name}"

    def end(self) -> None:
        """Removes what only the job needed."""

    def report(self) -> dict[str, Any]:
        """Returns the report of the training; empty if there is none."""
        return {}

    def readable(self, text: str) -> str:
        """Returns what a command has said with an owner's names of files, and without paths of this machine."""
        for path, name in self.files.values():
            text = text.replace(str(path), name).replace(path.name, name)
        return text.replace(str(self.base.store), "the store").replace(str(self.folder.parent), "the manager")


class Training(Work):
    def checking(self) -> Words:
        return ["check", *self._given()]

    def checked(self, found: dict[str, Any]) -> Checked:
        labels = len(found["training"]["label_counts"])
        said = f"{found['training']['texts']:,} texts to learn, {found['dev']['texts']:,} dev texts, {labels:,} labels"
        return Checked(f"{found['task']}, {said}", found["task"], labels, found["warnings"])

    def building(self, device: str) -> Words:
        wishes, more = self.job.wishes, list[object]()
        if wishes["best"]:
            more.append("--best")
        if (multiplier := wishes["learning_rate_multiplier"]) is not None:
            more += ["--learning-rate", (BEST_RATE if wishes["best"] else USUAL_RATE) * multiplier]
        more += _option("--epochs", wishes["n_epochs"])
        return ["build", "tenant", *self._given(), *more, "--seed", wishes["seed"], "--device", device]

    def _given(self) -> Words:
        """Returns the options of both."""
        job, wishes = self.job, self.job.wishes
        words: Words = ["--id", job.tenant, "--store", self.base.store, "--train", self.data["training_file"]]
        words += _option("--dev", self.data.get("validation_file"))
        words += [*_option("--task", job.task or wishes["task"]), *_option("--domain", job.domain)]
        if wishes["fresh"] or (not wishes["goes_on"] and self.versions()):
            words.append("--fresh")
        else:
            words += _option("--from-version", wishes["from_version"])
        return [*words, *["--new-labels"] * wishes["new_labels"]]

    def built(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        return (("warn", warning) for warning in found.get("warnings", []))

    def versions(self) -> list[int]:
        return self.base.versions(self.job.tenant)

    def held(self) -> Path:
        return self.base.store / "building" / "tenants" / self.job.tenant

    def chosen_name(self, version: int) -> tuple[str, str]:
        """Returns the tenant's own name or a candidate's, and why."""
        job, base = self.job, self.base
        waits, wish = f"{job.tenant}.v{version}", job.wishes["promote"]
        live = next((one for one in self.models.served(job.owner) if one.tenant.id == job.tenant), None)
        if live is not None and live.stored == version:
            return job.tenant, "the same data and settings have made it, and it is served already"
        if wish != PROMOTES[0]:
            return (job.tenant if wish == "always" else waits), f"the job's 'promote' is {wish!r}"
        if live is None:
            return job.tenant, "it is the first one"
        own = base.report(job.tenant, version)
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

    def publishing(self, version: int, name: str) -> Words:
        return self.models.publishing(self.base, self.job.tenant, version, name, self.folder)

    def published(self, version: int, name: str) -> None:
        self.models.published(self.base, self.job.tenant, version, name)

    def report(self) -> dict[str, Any]:
        return self.base.report(self.job.tenant, self.job.version) if self.job.version else {}


class Import(Training):
    fault = "invalid_checkpoint", "hplm"

    @property
    def what(self) -> str:
        return f"{len(self.job.wishes['import'])} files of a checkpoint"

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    def begin(self) -> None:
        """Lays the files under their names into a folder of the job."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.checkpoint.mkdir(mode=0o700)
        for id in self.job.wishes["import"]:
            path, name = self.files[id]
            os.link(path, self.checkpoint / name)

    def end(self) -> None:
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def checking(self) -> Words:
        return [*self._given(), "--plan"]

    def faults(self, found: dict[str, Any]) -> list[str]:
        return [*found.get("refused", {}).values()]

    def checked(self, found: dict[str, Any]) -> Checked:
        fits = found["fit"].get(self.job.tenant, {})  # of an adapter nothing is told
        return Checked("the checkpoint fits", fits.get("task"), fits.get("labels", 0))

    def building(self, device: str) -> Words:
        wishes = self.job.wishes
        more = [*_option("--epochs", wishes["n_epochs"]), *_option("--least", wishes["least"])]
        return [*self._given(), *more, "--seed", wishes["seed"], "--device", device]

    def _given(self) -> Words:
        job, texts = self.job, self.data.get("training_file")
        words: Words = ["import", "--from", self.checkpoint, "--id", job.tenant, "--store", self.base.store]
        return [*words, *_option("--domain", job.domain), *_option("--texts", texts), *_option("--task", job.wishes["task"])]

    def built(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        yield from super().built(found)
        if (same := found.get("after", {}).get("agreement")) is not None:
            yield "info", f"{same:.1%} of the answers to held-out texts are the checkpoint's"

    def remains(self) -> list[Path]:
        refused = self.base.store / "refused"  # what the builder did not store
        return [*super().remains(), *(refused / f"{self.job.tenant}.{ending}" for ending in ("json", "pt"))]

    def readable(self, text: str) -> str:
        text = super().readable(text.replace(str(self.checkpoint), "the checkpoint"))
        text = text.replace("give --texts FILE", "give a 'training_file' of texts like those that it will get")
        return text.replace("--least", "'least'")


class Domain(Work):
    """Makes a domain of a corpus, or its next version if there is one."""

    @property
    def name(self) -> str:
        assert self.job.domain is not None, "a domain's job names it"
        return self.job.domain

    def checked(self, found: dict[str, Any]) -> Checked:
        return Checked("the build reads the corpus")

    def building(self, device: str) -> Words:
        is_new = not self.job.version_before
        command: Words = ["build", "domain"] if is_new else ["domain", "update"]
        options = [word for name, value in self.job.wishes["options"].items() for word in _option(_flag(name), value)]
        own: Words = ["--name", self.name, "--store", self.base.store, "--corpus", self.data["training_file"]]
        return [*command, *own, *options, "--seed", self.job.wishes["seed"], "--device", device]

    def built(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        yield "info", f"{found['ngrams']:,} n-grams of {found['tokens']:,} tokens in {found['mb']:,.1f} MB"
        if behind := found.get("behind"):
            yield "info", f"{len(behind):,} tenants stay on the version that they were trained on, until they are trained again"

    def versions(self) -> list[int]:
        return self.base.domain_versions(self.name)

    def held(self) -> Path:
        return self.base.store / "building" / f"{self.name}-{(self.job.version_before or 0) + 1}"

    def publishing(self, version: int, name: str) -> Words:
        served = {branch.id for branch in self.base.manager.current().branches}
        if (self.name, version) in served:
            return []
        is_new = all(domain != self.name for domain, _ in served)
        return ["domain", "add" if is_new else "update", "--name", self.name, *self.base.places]

    def ended(self, name: str) -> str:
        return f"train models on {name}"

    def readable(self, text: str) -> str:
        text = super().readable(text)
        for name in DOMAIN_OPTIONS:
            text = text.replace(_flag(name), repr(name))
        return text


KINDS: dict[str, type[Work]] = {TRAINING: Training, IMPORT: Import, DOMAIN: Domain}


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _option(name: str, value: object) -> Words:
    return [name, value] if value is not None else []
