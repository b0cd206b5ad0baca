from __future__ import annotations

import random
from collections import Counter

from demo.docstrings import Definition
from demo.documents import SPLITS, Asked, Document, read_document, readable, split_documents

NUMPY_STYLE = """Move the books to another shelf.

Uses :func:`carry` and leaves dust behind.

>>> move(books)
'moved'

Parameters
----------
books : list
    What to move.

.. versionadded:: 2.0
"""


def document(text: str, module: str = "shelf.py", area: str = "books") -> Document:
    return read_document(Definition("bookshop", module, "move", "function", text), area)


def test_code_rulers_and_directives_are_left_out() -> None:
    read = document(NUMPY_STYLE)
    assert read.paragraphs == (
        "Move the books to another shelf.",
        "Uses `carry` and leaves dust behind.",
        "Parameters books : list What to move.",
    )
    assert read.text.startswith("Move the books to another shelf. Uses `carry`")


def sentence(number: int) -> str:
    chance = random.Random(number)
    return " ".join("".join(chance.choices("abcdefghij", k=6)) for _ in range(10))


def test_a_file_is_in_one_split_only_and_areas_keep_their_shares() -> None:
    documents = [
        document(sentence(100 * area + 10 * file + line), f"{area}/{file}.py", str(area))
        for area in range(2)
        for file in range(5)
        for line in range(10)
    ]
    splits = split_documents(documents)
    modules = {split: {one.definition.module for one in members} for split, members in splits.items()}
    assert set(splits) == set(SPLITS)
    assert all(modules[one].isdisjoint(modules[two]) for one in splits for two in splits if one != two)
    assert {split: Counter(one.area for one in members) for split, members in splits.items()} == {
        "train": {"0": 30, "1": 30},
        "dev": {"0": 10, "1": 10},
        "test": {"0": 10, "1": 10},
    }


def test_copies_of_a_text_are_in_one_split() -> None:
    template = "Construct a {} tokenizer, backed by the library that splits words into smaller pieces. Calls {}."
    copies = [document(template.format(f"{name}Model", f"{name}_base"), f"{name}.py") for name in ("Bert", "Gpt", "T5x")]
    other = document("Opens the till and counts the coins that lie within it today.", "till.py")
    kept = [one for members in split_documents([*copies, other]).values() for one in members]
    assert other in kept
    assert len(kept) == 2


def test_a_corpus_contains_nothing_similar_to_test_texts() -> None:
    asked = Asked([sentence(1), " ".join(sentence(number) for number in range(10, 14))])
    extended = document(
        f"{sentence(1)} {sentence(2)} {sentence(3)}", "extended.py"
    )  # all of a short test text, and other sentences
    extract = document(sentence(12), "extract.py")  # a small part of a long test text, and nothing else
    mention = document(f"{sentence(12)} {sentence(4)} {sentence(5)}", "mention.py")
    fresh = document(sentence(99), "fresh.py")
    assert readable([extended, extract, mention, fresh, fresh, document("Too short.")], asked) == [mention, fresh]
