"""The demo reads definitions of Python files. Tenants learn from their texts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from demo.docstrings import Definition, Source, read_definitions
from demo.documents import SPLITS, Asked, Document, read_document, readable, split_documents
from demo.domains import DOMAINS
from demo.tasks import TASKS, Classified, Names, Tagged, area, code_names, kind, parameters, returns
from hplm.errors import HplmError
from tests.support.message import mentioning

MODULE = '''"""What this module is for."""
raise RuntimeError("reading a source file must not run it")

if True:
    def conditional(): "Behind a condition."

class Shelf(Base):
    """Holds books."""

    def __init__(self, width, *, depth=1): ...

    @property
    def width(self):
        return self._width

    @functools.lru_cache(maxsize=8)
    def find(self, title, /, *rest, exact=False, **options):
        """Look for a book."""
        for book in self.books:
            if book.title == title:
                return book

    def burn(self):
        """Only raises."""
        raise NotImplementedError

    async def read(self):
        with self.open():
            while True:
                yield self.page()

    def close(self):
        def inner():
            return 1
        return None
'''
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
NAMES = Names(frozenset({"bookshop"}), {"BookShelf", "Clerk"}, {"move_books"})
LENT = Definition(
    "bookshop",
    "lending/desk.py",
    "Clerk.lend",
    "method",
    "Lend a book of the bookshop, see lending.rules: the reader takes it home for a few weeks.",
    parameters=("reader", "a"),
    returns_value=False,
)


def test_every_kind_of_definition_is_found_in_order_without_running_the_file(tmp_path: Path) -> None:
    (tmp_path / "shelf.py").write_text(MODULE)
    found = {one.qualified_name: one for one in read_definitions("bookshop", "shelf.py", tmp_path / "shelf.py")}
    methods = [f"Shelf.{name}" for name in ("__init__", "width", "find", "burn", "read", "close")]
    kinds = {"": "module", "conditional": "function", "Shelf": "class", **dict.fromkeys(methods, "method")}
    assert list(kinds.items()) == [(one.qualified_name, one.kind) for one in found.values()]
    assert (found[""].docstring, found["Shelf.__init__"].docstring) == ("What this module is for.", "")
    assert found["Shelf.find"].parameters == ("title", "rest", "exact", "options")
    assert found["Shelf"].parameters == ("width", "depth")
    assert [found[name].returns_value for name in methods] == [None, True, True, None, None, False]
    assert [found[name].is_property for name in methods] == [False, True, False, False, False, False]
    (tmp_path / "old.py").write_text("print 'two'")  # of another version of the language
    assert read_definitions("bookshop", "old.py", tmp_path / "old.py") == []
    with pytest.raises(HplmError, match=mentioning("'no_such_package_of_ours'", "pip install")):
        Source("no_such_package_of_ours").files()


def document(text: str, module: str = "shelf.py", area: str = "books") -> Document:
    return read_document(Definition("bookshop", module, "move", "function", text), area)


def sentence(number: int) -> str:
    chance = random.Random(number)
    return " ".join("".join(chance.choices("abcdefghij", k=6)) for _ in range(10))


def test_code_rulers_and_directives_are_left_out() -> None:
    assert document(NUMPY_STYLE).paragraphs == (
        "Move the books to another shelf.",
        "Uses `carry` and leaves dust behind.",
        "Parameters books : list What to move.",
    )
    assert document(NUMPY_STYLE).description == "Move the books to another shelf. Uses `carry` and leaves dust behind."


def test_a_file_is_in_one_split_only_and_areas_keep_their_shares() -> None:
    documents = [
        document(sentence(100 * area + 10 * file + line), f"{area}/{file}.py", str(area))
        for area in range(2)
        for file in range(5)
        for line in range(10)
    ]
    splits = split_documents(documents)
    modules = {split: {one.definition.module for one in members} for split, members in splits.items()}
    assert all(modules[one].isdisjoint(modules[two]) for one in splits for two in splits if one != two)
    assert {split: Counter(one.area for one in splits[split]) for split in SPLITS} == {
        split: {"0": size, "1": size} for split, size in (("train", 30), ("dev", 10), ("test", 10))
    }


def test_a_corpus_contains_nothing_similar_to_test_texts_and_copies_are_in_one_split() -> None:
    asked = Asked([sentence(1), " ".join(sentence(number) for number in range(10, 14))])
    extended = document(f"{sentence(1)} {sentence(2)} {sentence(3)}", "extended.py")  # a short test text, and other sentences
    extract = document(sentence(12), "extract.py")  # a small part of a long test text, and nothing else
    mention = document(f"{sentence(12)} {sentence(4)} {sentence(5)}", "mention.py")
    fresh = document(sentence(99), "fresh.py")
    assert readable([extended, extract, mention, fresh, fresh, document("Too short.")], asked) == [mention, fresh]
    template = "Construct a {} tokenizer, backed by the library that splits words into smaller pieces. Calls {}."
    copies = [document(template.format(f"{name}Model", f"{name}_base"), f"{name}.py") for name in ("Bert", "Gpt", "T5x")]
    other = document("Opens the till and counts the coins that lie within it today.", "till.py")
    kept = [one for members in split_documents([*copies, other]).values() for one in members]
    assert other in kept and len(kept) == 2


def lent(docstring: str = LENT.docstring, **facts: object) -> Document:
    return read_document(replace(LENT, docstring=docstring, **facts), "lending")


def test_a_text_does_not_say_its_label() -> None:
    said = "The BookShop's lending.rules for readers and for books of theirs."
    assert area(lent(said), NAMES) == Classified("The for readers and for books of theirs.", "lending")
    said = "This method can lend books to readers; Lend them well, lend() fails else."
    assert kind(lent(said), NAMES) == Classified("This can books to readers; Lend them well, fails else.", "method")
    assert returns(lent(said), NAMES) == Classified(said, "nothing")
    assert returns(lent(said, returns_value=True), NAMES) == Classified(said, "value")
    left_out = [kind(lent(kind="module"), NAMES), returns(lent(returns_value=None), NAMES)]
    assert [*left_out, *(task(lent(is_property=True), NAMES) for task in (kind, returns))] == [None] * 4


def test_words_are_tagged() -> None:
    said = "Lend `a` to the *reader*, a dear\none.\n\nNothing to be found in here."
    assert parameters(lent(said), NAMES) == Tagged(
        ("Lend", "a", "to", "the", "reader", "a", "dear", "one"),
        ("O", "PARAM", "O", "O", "PARAM", "O", "O", "O"),
    )
    example = code_names(lent("A BookShelf for the reader (int) of `Clerk` or Clerk calls move_books()."), NAMES)
    assert example == Tagged(
        ("A", "BookShelf", "for", "the", "reader", "int", "of", "Clerk", "or", "Clerk", "calls", "move_books"),
        ("O", "TYPE", "O", "O", "PARAM", "TYPE", "O", "TYPE", "O", "O", "O", "FUNCTION"),
    )


def test_every_area_of_the_demo_has_files_and_every_domain_tenants() -> None:
    assert {task.domain for task in TASKS} == {domain.name for domain in DOMAINS}
    assert len({task.tenant for task in TASKS}) == len(TASKS) and {task.task for task in TASKS} == {"classify", "tag"}
    for name, sources in (part for domain in DOMAINS for part in domain.areas.items()):
        assert sum(len(source.files()) for source in sources) >= 5, name
