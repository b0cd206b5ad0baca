"""How the tables of a domain know the words of a text: by whole windows, by shortened ones, or by the words alone.

A process of its own reads them: a vocabulary takes memory that the manager does without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np

from hplm.errors import HplmError
from hplm.model.config import BackboneConfig
from hplm.plot.forest import Chain
from hplm.plot.table import Table

WHOLE, SHORTENED, ALONE, COMPUTED = "whole", "shortened", "alone", "computed"
MEANINGS = {  # what readers are told
    WHOLE: "known with the words around it", SHORTENED: "known with a part of them", ALONE: "known only by itself",
    COMPUTED: "not known: the model computes it",
}  # fmt: skip
SECONDS = 20.0
Parts = list[tuple[str, str]]  # of a text, each word with how it is known, what is between words with ""


def parts_of(store: Path, domain: str, version: int, text: str) -> Parts:
    """Returns a text in parts. Raises if the tables cannot be read."""
    words = [sys.executable, "-m", "manager.coverage", store, domain, str(version)]
    try:
        done = subprocess.run(words, input=text.encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise HplmError(f"the tables of {domain!r} were not read within {SECONDS:g} s") from None
    if done.returncode:
        raise HplmError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return msgspec.json.decode(done.stdout, type=Parts)


def _read(store: Path, domain: str, version: int, text: str) -> Parts:
    from hplm.model.prompts import read_tokenizer, unlimited, with_start_id  # here, for the sake of the manager's memory

    config = BackboneConfig.load(store / "backbone.json")
    tokenizer = read_tokenizer(store / "tokenizer.json", unlimited)
    read = tokenizer.encode(text, add_special_tokens=not config.is_decoder)
    tokens = np.array(read.ids, dtype=np.int64)
    if config.start_id is not None:
        tokens = with_start_id(tokens, config.start_id)
    chain = _chain(store, domain, version)
    levels = chain.lookup(tokens, np.array([len(tokens)])).levels[len(tokens) - len(read.ids) :]
    kinds = [WHOLE, *[SHORTENED] * (len(chain.space.masks) - 2), ALONE]
    if config.is_decoder and (store / "lower" / f"{domain}-{version}.safetensors").exists():
        kinds[1:] = [COMPUTED] * len(kinds[1:])
    gaps = list(accumulate(map(str.isspace, text), initial=0))  # before each character
    found = dict[tuple[int, int], tuple[int, int, int]]()  # begin, end and level of each word, by what tells it from others
    for word, (begin, end), level in zip(read.word_ids, read.offsets, levels.tolist(), strict=True):
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())  # some tokens begin with the space before their word
        if word is not None and begin < end:
            first, last, worst = found.get(key := (word, gaps[begin]), (begin, end, 0))
            found[key] = min(first, begin), max(last, end), max(worst, level)
    parts, at = Parts(), 0
    for begin, end, level in sorted(found.values()):
        parts += [(text[at:begin], ""), (text[max(at, begin) : end], kinds[level])]
        at = max(at, end)
    return [*parts, (text[at:], "")]


def _chain(store: Path, domain: str, version: int) -> Chain:
    links, step = list[tuple[Table, int]](), (domain, version)
    while step is not None:
        links.append((Table(store / "plot" / step[0] / str(step[1])), 0))  # nobody reads addresses
        step = links[-1][0].meta.parent_branch
    return Chain(links)


if __name__ == "__main__":
    store, domain, version = sys.argv[1:]
    try:
        print(json.dumps(_read(Path(store), domain, int(version), sys.stdin.read())))
    except HplmError as error:
        sys.exit(str(error))
