"""The demo's texts: no corpus or other split has what a test asks, and no text says its own label."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from demo.docstrings import Definition
from demo.documents import SPLITS, Asked, Document, read_document, readable, split_documents
from demo.tasks import Classified, Names, area, code_names, kind, parameters, returns

NAMES = Names(frozenset({"bookshop"}), {"BookShelf", "Clerk"}, {"move_books"})


def document(text: str, module: str = "shelf.py", area: str = "books", **facts: object) -> Document:
    return read_document(replace(Definition("bookshop", module, "move", "function", text), **facts), area)


def sentence(number: int) -> str:
    chance = random.Random(number)
    return " ".join("".join(chance.choices("abcdefghij", k=6)) for _ in range(10))


def test_a_file_is_in_one_split_only_and_areas_keep_their_shares() -> None:
    splits = split_documents([document(sentence(i), f"{i // 10}.py", str(i // 50)) for i in range(100)])
    modules = [module for members in splits.values() for module in {one.definition.module for one in members}]
    assert len(modules) == len(set(modules)) == 10
    shares = {split: Counter(one.area for one in splits[split]) for split in SPLITS}
    assert shares == {split: {"0": size, "1": size} for split, size in (("train", 30), ("dev", 10), ("test", 10))}


def test_a_corpus_contains_nothing_similar_to_test_texts_and_copies_are_in_one_split() -> None:
    asked = Asked([sentence(1), " ".join(sentence(number) for number in range(10, 14))])
    extended = document(f"{sentence(1)} {sentence(2)} {sentence(3)}")  # a short test text, and other sentences
    extract = document(sentence(12))  # a small part of a long test text, and nothing else
    mention, fresh = document(f"{sentence(12)} {sentence(4)} {sentence(5)}"), document(sentence(99))
    assert readable([extended, extract, mention, fresh, fresh, document("Too short.")], asked) == [mention, fresh]
    template = "Construct a {} tokenizer, backed by the library that splits words into smaller pieces. Calls {}."
    copies = [document(template.format(f"{name}Model", f"{name}_base"), f"{name}.py") for name in ("Bert", "Gpt", "T5x")]
    other = document("Opens the till and counts the coins that lie within it today.", "till.py")
    kept = [one for members in split_documents([*copies, other]).values() for one in members]
    assert other in kept and len(kept) == 2


def lent(docstring: str, **facts: object) -> Document:
    own = {"qualified_name": "Clerk.lend", "kind": "method", "parameters": ("reader", "a"), "returns_value": False}
    return document(docstring, "lending/desk.py", "lending", **(own | facts))


def test_a_text_does_not_say_its_label() -> None:
    said = "The BookShop's lending.rules for readers and for books of theirs."
    assert area(lent(said), NAMES) == Classified("The for readers and for books of theirs.", "lending")
    said = "This method can lend books to readers; Lend them well, lend() fails else."
    assert kind(lent(said), NAMES) == Classified("This can books to readers; Lend them well, fails else.", "method")
    assert returns(lent(said), NAMES) == Classified(said, "nothing")
    assert returns(lent(said, returns_value=True), NAMES) == Classified(said, "value")
    left_out = [kind(lent(said, kind="module"), NAMES), returns(lent(said, returns_value=None), NAMES)]
    assert [*left_out, *(task(lent(said, is_property=True), NAMES) for task in (kind, returns))] == [None] * 4


def test_words_are_tagged() -> None:
    def tagged(task, said: str) -> list[tuple[str, str]]:
        found = task(lent(said), NAMES)
        return [(word, tag) for word, tag in zip(found.tokens, found.tags, strict=True) if tag != "O"]

    said = "Lend `a` to the *reader*, a dear\none.\n\nNothing to be found in here."
    assert tagged(parameters, said) == [("a", "PARAM"), ("reader", "PARAM")]
    assert parameters(lent(said), NAMES).text == "Lend a to the reader a dear one"
    assert tagged(code_names, "A BookShelf for the reader (int) of `Clerk` or Clerk calls move_books().") == [
        ("BookShelf", "TYPE"), ("reader", "PARAM"), ("int", "TYPE"), ("Clerk", "TYPE"), ("move_books", "FUNCTION"),
    ]  # fmt: skip
