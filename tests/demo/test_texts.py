"""Texts that the demo takes from docstrings do not say their label, and their words are tagged."""

from __future__ import annotations

from dataclasses import replace

from demo.docstrings import Definition
from demo.documents import Docstring, read_document
from demo.rewriting import mood, signature, summary
from demo.tasks import Classified, DefinedNames, Rewritten, area, code_names, kind, parameters, returns

NAMES = DefinedNames(frozenset({"bookshop"}), {"BookShelf", "Clerk"}, {"move_books"})


def lent(docstring: str, **facts: object) -> Docstring:
    definition = Definition("bookshop", "lending/desk.py", "Clerk.lend", "method", docstring, ("reader", "a"))
    return read_document(replace(definition, **{"returns_value": False, **facts}), "lending")


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


def test_sentences_are_rewritten() -> None:
    first, others = (
        "Returns a book to its own shelf.",
        "It must be there before the desk closes. Late readers pay for each of the days.",
    )
    body = f"{others}\n\nIn one sentence:"
    assert summary(lent(f"{first} {others}"), NAMES) == Rewritten(body, f" {first}")
    assert signature(lent(first), NAMES) == Rewritten("def lend(reader, a):\n\nIn one sentence:", f" {first}")
    assert mood(lent(first), NAMES) == Rewritten(f"{first}\n\nIn the other form:", " Return a book to its own shelf.")
    assert mood(lent("Return a book to its shelf."), NAMES).target == " Returns a book to its shelf."
    left_out = [summary(lent(first), NAMES), signature(lent(first, kind="class"), NAMES), mood(lent(others), NAMES)]
    assert [*left_out, signature(lent("Lends it."), NAMES), signature(lent("Lends a book or two"), NAMES)] == [None] * 5
