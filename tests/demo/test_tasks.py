from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from demo.docstrings import Definition
from demo.documents import Document, read_document
from demo.domains import DOMAINS
from demo.tasks import TASKS, Classified, Names, Tagged, area, code_names, kind, parameters

NAMES = Names(frozenset({"bookshop"}), {"BookShelf", "Clerk"}, {"move_books"})
LENT = Definition(
    "bookshop",
    "lending/desk.py",
    "Clerk.lend",
    "method",
    "Lend a book of the bookshop, see lending.rules: the reader takes it home for a few weeks.",
    parameters=("reader", "a"),
)


def asked(definition: Definition = LENT, **facts: object) -> Document:
    return read_document(replace(definition, **facts), "lending")


def test_an_area_s_text_does_not_name_its_package_or_module() -> None:
    example = area(asked(docstring="The BookShop's lending.rules for readers and for books of theirs."), NAMES)
    assert example == Classified("The for readers and for books of theirs.", "lending")


def test_a_kind_s_text_does_not_name_the_thing_or_its_kind() -> None:
    example = kind(asked(docstring="This method can lend books to readers; Lend them well, lend() fails else."), NAMES)
    assert example == Classified("This can books to readers; Lend them well, fails else.", "method")
    assert kind(asked(decorators=("property",)), NAMES) is None
    assert kind(asked(kind="module"), NAMES) is None


def test_parameters_are_tagged_and_markup_is_removed() -> None:
    example = parameters(asked(docstring="Lend `a` to the *reader*, a dear\none.\n\nNothing to be found in here."), NAMES)
    assert example == Tagged(
        ("Lend", "a", "to", "the", "reader", "a", "dear", "one"),
        ("O", "PARAM", "O", "O", "PARAM", "O", "O", "O"),
    )


def test_code_names_get_their_kinds() -> None:
    example = code_names(asked(docstring="A BookShelf for the reader (int) of `Clerk` or Clerk calls move_books()."), NAMES)
    assert example is not None
    assert dict(zip(example.tokens, example.tags, strict=True)) == {
        "A": "O",
        "BookShelf": "TYPE",
        "for": "O",
        "the": "O",
        "reader": "PARAM",
        "int": "TYPE",
        "of": "O",
        "or": "O",
        "Clerk": "O",
        "calls": "O",
        "move_books": "FUNCTION",
    }
    assert example.tags[example.tokens.index("Clerk")] == "TYPE"


def test_every_domain_of_the_demo_has_tenants_and_both_tasks_occur() -> None:
    assert len(DOMAINS) >= 3
    assert {task.domain for task in TASKS} == {domain.name for domain in DOMAINS}
    assert len({task.tenant for task in TASKS}) == len(TASKS)
    counts = Counter(task.task for task in TASKS)
    assert counts["classify"] >= 4
    assert counts["tag"] >= 2


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.name)
def test_every_area_finds_files_in_what_is_installed(domain) -> None:
    for part in domain.areas:
        assert sum(len(source.files()) for source in part.sources) >= 5, part.name
