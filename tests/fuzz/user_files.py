"""Bad files and options that users give. Reading them works, or fails with an error that says why."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import ClassVar

import zstandard
from hypothesis import strategies as st

from builder.importing.found import halves, records, storable, upper_layout
from builder.importing.heads import check_head, chosen_labels
from builder.importing.tenant import read_folder
from builder.training.labelled import read_answers, read_corpus, read_label, read_labelled, read_labels, read_tags, read_value
from hplm.engine.settings import check
from hplm.scheduling.policy import policy
from hplm.scheduling.simulation.arrivals import read_trace
from loadtest.recorded import read_recorded
from loadtest.traffic import lengths_of
from testing.toy import CONFIG, WORDS, make_toy
from tests.fuzz.files import Files
from tests.fuzz.mutations import WORDS as ODD
from tests.fuzz.mutations import dumped, values
from tests.fuzz.target import Target, accepts

FIXTURES = Path(__file__).parents[1] / "builder" / "importing" / "fixtures"


class Imports(Files):
    """Folders that `peft` and `adapters` saved."""

    kept = (("adapters-lora-tag/adapter.safetensors", b""), ("adapters-double/pytorch_adapter.bin", b"."))
    weight = 0.3

    def make(self, folder):
        for name in ("peft-tag-patterns", "adapters-double", "adapters-lora-tag", "adapters-stock-head"):
            shutil.copytree(FIXTURES / name, folder / "saved" / name)
        return folder / "saved"

    def names(self):
        return [name for name in super().names() if not name.endswith("expected.json")]

    def check(self, case):
        self.tried = case[0].partition("/")[0]
        super().check(case)

    def read(self):
        adapter, head = read_folder(self.folder / self.tried, str(self.work), None)
        config = CONFIG
        chosen_labels(head.task, None, head.labels, len(head.weights["weight"]), head.source)
        check_head(head.weights, head.function, config, head.source)
        layout = upper_layout(adapter, halves(adapter, config).upper, config)
        if layout is not None:
            for record in records(halves(adapter, config).upper, layout):
                storable(record, layout, adapter.source)


class Labelled(Files):
    """Labelled data of each task."""

    weight = 2

    READERS: ClassVar = {
        "classify.jsonl": read_label,
        "multilabel.jsonl": read_labels,
        "regress.jsonl": read_value,
        "tag.jsonl": read_tags,
        "span.jsonl": read_answers,
    }

    def make(self, folder):
        lines = {
            "classify.jsonl": [{"text": "a b", "label": "x"}, {"text": "c", "text_pair": "d", "label": 1}],
            "multilabel.jsonl": [{"text": "a b", "labels": ["x", "y"]}, {"text": "c", "labels": []}],
            "regress.jsonl": [{"text": "a b", "label": 1.5}, {"text": "c", "label": -1}],
            "tag.jsonl": [{"tokens": ["a", "b"], "tags": ["O", "X"]}],
            "span.jsonl": [{"text": "q", "text_pair": "a b c", "answers": {"text": ["b"], "answer_start": [2]}}],
        }
        (folder / "data").mkdir()
        for name, some in lines.items():
            (folder / "data" / name).write_bytes(b"\n".join(map(dumped, some)))
        return folder / "data"

    def check(self, case):
        self.tried = case[0]
        super().check(case)

    def read(self):
        read_labelled(self.folder / self.tried, self.READERS[self.tried])


class Corpora(Labelled):
    """Corpora, plain and compressed."""

    weight = 2

    def make(self, folder):
        text = ("\n".join(" ".join(WORDS[i : i + 7]) for i in range(40)) + "\n").encode()
        documents = b"\n".join(dumped({"text": line.decode()}) for line in text.splitlines())
        (folder / "data").mkdir()
        for name, data in (("a.txt", text), ("b.jsonl", documents)):
            (folder / "data" / name).write_bytes(data)
            (folder / "data" / f"{name}.gz").write_bytes(gzip.compress(data))
            (folder / "data" / f"{name}.zst").write_bytes(zstandard.compress(data))
        return folder / "data"

    def read(self):
        for _ in read_corpus([self.folder / self.tried]):
            pass


class Traces(Labelled):
    """Recorded loads."""

    kept = (
        ("trace.jsonl", b'{"arrival": [0], "tokens": 3}'),
        ("trace.jsonl", b"\x82"),
        ("trace.jsonl", b'{"arrival": 1, "tokens": 10000000000000000000000}'),
    )

    def make(self, folder):
        (folder / "data").mkdir()
        rows = [
            {"arrival": 1.5, "tokens": 9, "tenant": "x", "deadline_ms": 80, "priority": 1},
            {"arrival": 2, "text": "a b", "tokens": 3},
        ]
        (folder / "data" / "trace.jsonl").write_bytes(b"\n".join(map(dumped, rows)))
        return folder / "data"

    def read(self):
        accepts(lambda: read_trace(self.folder / self.tried), self.work)
        accepts(lambda: read_recorded(self.folder / self.tried, ["x"]), self.work)


class Options(Target):
    """Values of `config.pbtxt` and of the command line."""

    weight = 2

    def __init__(self, folder):
        config = (make_toy(folder).repository / "toy-upper" / "config.pbtxt").read_text()
        found = [line.split('"') for line in config.splitlines() if line.startswith("parameters")]
        self.good = {parts[1]: parts[3] for parts in found} | {"deadline_ms": "0"}
        self.folder = folder

    def cases(self):
        odd = st.one_of(st.sampled_from([*ODD, "0", "-1", "1e400", "nan", "٣", "1_0"]), st.text(max_size=12), values.map(str))
        names = st.sampled_from(["timely", "das", "sjf", "edf", "x"])
        options = st.sampled_from(["eta", "q", "rows", "horizon", "reserve", "in_time"])
        policies = st.builds("{}:{}={}".format, names, options, odd)
        parameters = st.dictionaries(st.sampled_from(sorted(self.good)), odd, min_size=1, max_size=2)
        return st.one_of(
            st.tuples(st.just("parameters"), parameters),
            st.tuples(st.just("policy"), st.one_of(odd, policies)),
            st.tuples(st.just("lengths"), st.one_of(odd, odd.map(lambda value: f"normal:{value},20"))),
        )

    def check(self, case):
        kind, given = case
        read = {
            "parameters": lambda: check({**self.good, **given}),
            "policy": lambda: policy(given),
            "lengths": lambda: lengths_of(given),
        }
        accepts(read[kind], self.folder)


TARGETS = {
    "import": Imports,
    "labelled": Labelled,
    "corpus": Corpora,
    "trace": Traces,
    "options": Options,
}
