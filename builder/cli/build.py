"""`hplm build root`, `domain` and `tenant`: turn a checkpoint, corpora and labelled data into a store.

`hplm root pack` and `unpack`: a store's root in one file.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from builder.cli.options import ColumnNames, PartOption, open_store, wanted_start
from builder.part import WHOLE
from builder.tasks.columns import AS_TRAINED, Columns
from hplm.cli.options import (
    CORPUS,
    Device,
    Learn,
    Seed,
    StoreFolder,
    TaskName,
    Words,
    about,
    device_of,
    refuse_given,
)
from hplm.errors import InvalidInput
from hplm.options import BANK_DTYPES, MIN_TOKENS, TABLE_DTYPES

if TYPE_CHECKING:
    from builder.store.store import Store
    from hplm.plot.table import Table as BuiltTable

Packed = Annotated[Path, about("the packed root, a tar archive")]
ROOT_MINUTES, DOMAIN_MINUTES = 10.0, 5.0  # to adapt the lower layers
FP16 = "fp16"


@Parameter(name="*", group="Table")
@dataclass(frozen=True)
class Table:
    """The options of the steps that build a table."""

    keep: float | None = None
    """share of the corpus's different windows to store, the most frequent first; shorter n-grams are stored beside them
    (default: 1, or less for a table of a million n-grams; of a next version, as before)"""
    dtype: Annotated[str | None, Parameter(choices=TABLE_DTYPES)] = None
    """precision of the stored vectors (default: fp16; of a next version, as before)"""
    minutes: float | None = None
    """most time to adapt the lower layers; 0: none (default: 10 of a root, 5 of a domain, 0 of a next version, which then
    keeps old vectors; or no limit with --steps)"""
    steps: int | None = None
    """most steps to adapt the lower layers: without --minutes, the same number on every machine (default: no limit)"""
    counts: tuple[Path, ...] = ()
    """folders of `hplm build counts`, which give the n-grams; then the lower layers only learn from --corpus, so a part of the
    texts is enough"""
    seed: Seed = 0
    device: Device = "auto"

    def most(self, default: float) -> float | None:
        """Returns the limit of time; None if only the steps are limited."""
        return self.minutes if self.minutes is not None or self.steps is not None else default

    @property
    def counted(self) -> list[str]:
        return [str(folder.absolute()) for folder in self.counts]


TABLE = Table()


def root(
    *, model: str, corpus: Annotated[tuple[Path, ...], about(f"{CORPUS} (a decoder with --lower 0 needs none)")] = (),
    store: StoreFolder, name: str | None = None, lower: int | None = None, upper: int | None = None, window: int | None = None,
    until: float | None = None, masked: float = 0.0, table: Table = TABLE,
) -> dict:  # fmt: skip
    """Split an encoder or a decoder, adapt its lower stack to windows, build the root table.

    :param model: Hugging Face name or folder of a BERT or a relative of it (docs/training.md#models), or of a decoder (gpt2,
        llama, opt); or a .gguf file of a llama
    :param name: name of the backbone (default: the model's)
    :param lower: number of lower layers (default: half); 0, of a decoder: the table holds its words
    :param upper: number of upper layers (default: the rest)
    :param window: tokens in a window (default: 3, or 1 with --lower 0)
    :param until: end as soon as this share of the variance of the original model's output is explained on held-out texts, such
        as 0.94, or of a decoder as soon as the whole model's perplexity is this share of its own; --minutes and --steps remain
        limits (default: learn until one of these)
    :param masked: last share of --minutes, in which an encoder's lower layers learn to predict masked words of the corpus;
        domains continue with the same prediction head
    """
    from builder.learning.limits import Budget
    from builder.tables.root import RootOptions, build_root
    from hplm.model.windows import TRIGRAMS, Window

    usual = 1 if lower == 0 else TRIGRAMS.n
    windows = Window(usual if window is None else window)
    options = RootOptions(
        table.keep, table.seed, table.dtype or FP16, name, lower, upper, windows, masked, counts=table.counted
    )
    budget = Budget(table.most(ROOT_MINUTES), table.steps, until)
    made, built = build_root(model, [*corpus], store, options, budget, device_of(table.device))
    return table_built(made, built, f"root of backbone {made.config.name}") | _learned(made.learned("root", 1))


def _learned(report: dict[str, Any]) -> dict[str, Any]:
    """Says how well a root learned."""
    from builder.learning.limits import LITTLE_EXPLAINED

    if (perplexity := report.get("perplexity")) is not None:
        print(
            "perplexity on held-out texts: {kept:g}; {whole:g} of the whole model, {start:g} at the start".format(**perplexity)
        )
        return {"perplexity": perplexity}
    if (share := report.get("explained")) is None:
        return {}
    is_little = share < LITTLE_EXPLAINED
    more = f", which is little: with more --minutes, until it explains {LITTLE_EXPLAINED:g}, its tenants lose less" * is_little
    print(f"it explains {share:.3f} of the variance of the original model's output{more}")
    return {"explained": share}


def domain(
    *, name: str, corpus: Annotated[tuple[Path, ...], about(CORPUS)], store: StoreFolder, parent: str = "root",
    learn: Learn = None, min_tokens: int = MIN_TOKENS, table: Table = TABLE,
) -> dict:  # fmt: skip
    """Adapt the lower stack to a corpus, build the domain's table.

    :param name: name of the domain
    :param parent: domain that this one falls back to
    :param min_tokens: refuse a corpus of fewer tokens: look-ups would rarely hit its table
    """
    from builder.learning.limits import Budget
    from builder.tables.domain import DomainOptions, build_domain

    options = DomainOptions(table.keep, table.seed, table.dtype or FP16, parent, learn, min_tokens, counts=table.counted)
    budget = Budget(table.most(DOMAIN_MINUTES), table.steps)
    opened = open_store(store)
    built = build_domain(opened, name, [*corpus], options, budget, device_of(table.device))
    return table_built(opened, built, f"domain {name}")


def counts(
    *, corpus: Annotated[tuple[Path, ...], about(CORPUS)], to: Path, store: Path | None = None, model: str | None = None,
    window: int | None = None, part: PartOption = WHOLE,
) -> dict:  # fmt: skip
    """Count a corpus's n-grams, such as a part of them on each of many machines: later builds take all with --counts.

    :param to: folder of the counts, for each part another
    :param store: store that will have them, or a copy of it (`hplm root pack`)
    :param model: instead of --store, the model of a root that will be built
    :param window: tokens in that root's window (default: 3)
    :param part: I/N: only each N-th file of --corpus, by size
    """
    from builder.tables.build_folder import locked_folder
    from builder.tables.parts import NgramSettings, count_part
    from builder.tables.text_files import check_stays
    from hplm.model.checkpoint import load_checkpoint
    from hplm.model.windows import TRIGRAMS, Window
    from hplm.plot.keys import KeySpace

    if (store is None) == (model is None):
        raise InvalidInput("give either --store, or --model of a root that will be built: it names the tokenizer")
    for file in corpus:
        check_stays(file)
    if store is not None:
        refuse_given("works only with --model: a store has its window", window=window)
        reading = NgramSettings.of(open_store(store))
    else:
        made = load_checkpoint(str(model), window=Window(TRIGRAMS.n if window is None else window))
        config = made.config
        reading = NgramSettings(
            made.tokenizer_json, config.positions, config.start_id, KeySpace(config.vocabulary, config.window)
        )
    with locked_folder(to, str(to)):
        counted = count_part(corpus, part, reading, to)
    print(f"{to}: {sum(counted.levels):,} n-grams of {counted.tokens:,} tokens. Give it to a build with --counts")
    return {"counts": str(to), "tokens": counted.tokens, "ngrams": sum(counted.levels), "part": [part.number, part.of]}


@Parameter(name="*", group="Training")
@dataclass(frozen=True)
class Training:
    """The options of the training, of the stored adapter and of its head."""

    adapter: str | None = None
    """kind of adapter: bottleneck or lora (default: as in the tenant's version before, or bottleneck)"""
    rank: int | None = None
    """rank of the adapter; 0: only a head (default: as in the version before, or 32)"""
    places: Words | None = None
    """projections that the adapter changes, between commas: query, key, value, attention_out, ffn_in, ffn_out, and
    ffn_gate of gated layers (default: as in the version before, or attention_out; lora: query,value; with --upper-rate all)"""
    dtype: Annotated[str | None, Parameter(choices=BANK_DTYPES)] = None
    """precision of the stored adapter and head (default: as in the version before, or fp16)"""
    epochs: int = 4
    """maximum number of epochs"""
    patience: int = 3
    """stop after this many epochs without a better dev score"""
    learning_rate: float = 2e-3
    """learning rate of adapter and head"""
    upper_rate: float = 0.0
    """also train the upper layers, at this learning rate, and store their change as a LoRA of rank --rank. Answers get better,
    and training takes 1.5 times as long. 1e-4 is a good rate; 0: train only adapter and head"""
    teacher: str | None = None
    """the folder of a checkpoint with the same labels, whose soft answers the tenant learns beside the labels"""
    best: bool = False
    """the options of the best answers: --adapter lora --upper-rate 1e-4 --learning-rate 1e-3, where no others are given"""

    def given(self) -> dict[str, Any]:
        """Returns what is given of `TrainingOptions`."""
        preset = {name: value for name, value in BEST.items() if self.best and getattr(self, name) == getattr(USUAL, name)}
        named = {**vars(self), **preset}
        left_out = "upper_rate", "teacher", "best"
        own = {name: value for name, value in named.items() if value is not None and name not in left_out}
        return {"body_rate": named["upper_rate"], **own}


@Parameter(name="*", group="For the task embed")
@dataclass(frozen=True)
class Vectors:
    """The options of a tenant that makes vectors. All are by default as in the tenant's version before."""

    pooling: Literal["mean", "first"] | None = None
    """a vector is the mean of all tokens' states, or the first token's (default: mean)"""
    normalised: bool | None = None
    """vectors have the length 1 (default: yes)"""
    dimensions: int | None = None
    """of a vector (default: the width of the backbone)"""
    shortens: bool | None = None
    """also learn the first half, quarter, ... of the dimensions, so that requests may ask for fewer"""
    query_prefix: str | None = None
    """what stands before texts that search, such as 'query: '"""
    passage_prefix: str | None = None
    """what stands before texts that are found, such as 'passage: '"""

    def given(self) -> dict[str, Any]:
        """Returns what is given of an `Embedding`."""
        named = {"query": self.query_prefix, "passage": self.passage_prefix}
        prefixes = {name: value for name, value in named.items() if value is not None}
        own = {name: value for name, value in vars(self).items() if value is not None and not name.endswith("_prefix")}
        given = own | ({"prefixes": prefixes} if prefixes else {})
        return {"embedding": given} if given else {}


USUAL, ANY_VECTORS = Training(), Vectors()
BEST = {"adapter": "lora", "upper_rate": 1e-4, "learning_rate": 1e-3}
TASK = "what it learns, such as classify or tag: docs/training.md (default: that of the tenant's version before)"


def tenant(
    *, id: str, store: StoreFolder, train: Path | None = None, dev: Path | None = None,
    task: Annotated[TaskName, about(TASK)] = None, domain: str | None = None,
    from_version: int | None = None, fresh: bool = False, new_labels: bool = False, training: Training = USUAL,
    vectors: Vectors = ANY_VECTORS, seed: Seed = 0, device: Device = "auto", columns: ColumnNames = AS_TRAINED,
) -> dict:  # fmt: skip
    """Train an adapter and a head on labelled data.

    :param id: name of the tenant
    :param train: training data, JSONL, CSV or Parquet (docs/training.md); without it, a tenant of a decoder takes the backbone
        as it is
    :param dev: dev data (default: a tenth of the training data)
    :param domain: domain of the tenant (default: that of its version before, or root)
    :param from_version: go on training this version of the tenant (default: the newest, if the training data are new)
    :param fresh: start anew, from random weights
    :param new_labels: the data may have labels that the tenant's version before lacks: they come behind its own, which keep
        what they have learned
    """
    from builder.training.build import build_tenant

    opened = open_store(store)
    check_tenant(opened, id, train, dev, task, domain, from_version, fresh, training, columns, vectors, new_labels)
    if opened.config.is_decoder and train is None:
        from builder.importing.adapter_import import plain_tenant

        made = plain_tenant(opened, id, domain)
        how = f"with its {made.adapter}" if made.rank else f"as backbone {opened.config.name} does"
        print(f"tenant {made.id} version {made.version}: {made.task} on {made.domain}, {how}")
        return {"tenant": made.id, "version": made.version, "task": made.task}
    assert train is not None  # it was checked
    made = build_tenant(
        opened, id, domain, task, train, dev, from_version=wanted_start(from_version, fresh), device=device_of(device),
        teacher=training.teacher, seed=seed, columns=columns, new_labels=new_labels, **training.given(), **vectors.given(),
    )  # fmt: skip
    report = opened.report(made)
    scores = report["dev"]
    for warning in (warnings := report.get("warnings", [])):  # those of 0.1.0 have none
        print(warning)
    metric = scores["metric"]
    before = f"; version {report['from_version']} had {report['at_start']['dev']:.3f}" if "at_start" in report else ""
    print(f"tenant {made.id} version {made.version}: {metric} {scores[metric]:.3f} on {scores['texts']} dev texts{before}")
    print(f"how it was trained: {opened.tenant_folder(made.id, made.version)}/report.html")
    answer = {"tenant": made.id, "version": made.version, "from_version": report["from_version"]}
    return answer | {"task": made.task, "labels": made.labels, "dev": scores, "warnings": warnings}


def check_tenant(
    store: Store, id: str, train: Path | None, dev: Path | None, task: str | None, domain: str | None,
    from_version: int | None, fresh: bool, training: Training, columns: Columns = AS_TRAINED,
    vectors: Vectors = ANY_VECTORS, new_labels: bool = False,
) -> None:  # fmt: skip
    """Refuses what is wrong with the options of `hplm build tenant`, before any data are read."""
    from builder.store.store import check_name
    from builder.tables.text_files import check_file
    from builder.tasks.labels import check_new_labels
    from builder.training.build import checked_options, chosen_task
    from builder.training.start import check_version
    from builder.training.teachers import teacher_folder
    from hplm.tasks.tasks import check_backbone

    check_name("tenant", id)
    if task is not None:
        check_backbone(task, store.config)
    wanted_start(from_version, fresh)
    known = store.tenant(id)
    store.latest(domain or (known.domain if known is not None else "root"))  # refuses an unknown one
    if store.config.is_decoder and train is None:
        reason = "works only with --train: without it a decoder's tenant takes the backbone as it is"
        refuse_given(reason, training, columns, dev=dev, from_version=from_version, fresh=fresh, new_labels=new_labels)
        return
    if train is None:
        raise InvalidInput("a tenant learns from labelled data: give --train FILE")
    task = chosen_task(store.config, id, known, task)
    if new_labels:
        check_new_labels(task)
    for file in (train, dev):
        if file is not None:
            check_file(file)
    checked_options(store, task, known, training.given() | vectors.given())
    if from_version is not None:
        check_version(store, id, from_version)
    if training.teacher is not None:
        teacher_folder(training.teacher)


def pack(file: Packed, /, *, store: StoreFolder) -> dict:
    """Write a store's root to one file, with checksums."""
    from builder.store.pack import pack_root

    manifest = pack_root(open_store(store), file)
    size = file.stat().st_size
    print(f"root of backbone {manifest.backbone}: {file}, {size / 1e6:,.1f} MB")
    return {"backbone": manifest.backbone, "version": manifest.version, "file": str(file), "bytes": size}


def unpack(file: Packed, /, *, store: Path, model: str | None = None) -> dict:
    """Make a store from a packed root.

    :param store: new folder for the store
    :param model: original model: Hugging Face name or folder, if it lies elsewhere here (default: as packed)
    """
    from builder.store.pack import unpack_root

    made = unpack_root(file, store, model)
    if Path(made.model).is_absolute() and not Path(made.model).exists():
        print(
            f"the original model, {made.model}, is not here: domains that learn and comparisons with it need it; name it "
            "with --model",
            file=sys.stderr,
        )
    return table_built(made, made.table("root", made.latest("root")), f"root of backbone {made.config.name}")


def table_built(store: Store, table: BuiltTable, what: str) -> dict:
    """Says what was built."""
    meta = table.meta
    print(f"{what}: {meta.keys:,} n-grams of {meta.corpus_tokens:,} tokens in {meta.megabytes:,.1f} MB")
    return {
        "domain": meta.domain,
        "version": meta.version,
        "ngrams": meta.keys,
        "tokens": meta.corpus_tokens,
        "mb": meta.megabytes,
        "dtype": meta.dtype,
        "least_cosine": meta.least_cosine,
    }
