"""The links of the documents lead somewhere."""

import re
from pathlib import Path

import pytest

from hplm.request.form import HEAD_BYTES

ROOT = Path(__file__).parents[1]
ROOMS = ("clients", "deploy", "docs", "model_repository", "research")
DOCUMENTS = sorted(
    path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(found for room in ROOMS for found in (ROOT / room).rglob("*.md")))
)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def anchors(text):
    """Returns the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_leads_to_a_file_and_a_heading(document):
    missing = []
    for path, anchor in LINK.findall(CODE.sub("", (ROOT / document).read_text("utf-8"))):
        if ":" in path:  # on another host
            continue
        target = (ROOT / document.parent / path) if path else ROOT / document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))):
            missing.append(f"{path}#{anchor}")
    assert not missing


def test_formats_says_how_long_the_head_of_a_ticket_is():
    assert f"first {HEAD_BYTES} bytes" in (ROOT / "docs/formats.md").read_text("utf-8")


def test_every_picture_of_the_docs_is_shown():
    shown = {
        (ROOT / document.parent / path).resolve()
        for document in DOCUMENTS
        for path, _ in LINK.findall((ROOT / document).read_text("utf-8"))
    }
    assert not [picture for picture in (ROOT / "docs/pictures").iterdir() if picture.resolve() not in shown]
