"""The links of the documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")))
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def anchors(text):
    """Returns the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_leads_to_a_file_and_a_heading(document):
    missing = []
    for path, anchor in LINK.findall((ROOT / document).read_text("utf-8")):
        if ":" in path:  # on another host
            continue
        target = (ROOT / document.parent / path) if path else ROOT / document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))):
            missing.append(f"{path}#{anchor}")
    assert not missing
