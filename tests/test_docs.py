"""The links of the documents lead somewhere, and their commands exist with their options."""

import re
from pathlib import Path

import pytest

from hplm.cli.main import application, main
from hplm.request.form import HEAD_BYTES

ROOT = Path(__file__).parents[1]
ROOMS = ("clients", "deploy", "docs", "model_repository", "research")
DOCUMENTS = sorted(
    path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(found for room in ROOMS for found in (ROOT / room).rglob("*.md")))
)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^(?:\./run |\w+=\S+ )?|`(?:\w+=\S+ )?)hplm ([a-z][^`\n#|]*)", re.MULTILINE)
OF_EARLIER_COMMITS = {Path("CHANGELOG.md"), Path("research/findings/README.md")}


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


def test_every_command_of_the_documents_exists_with_its_options(capsys):
    top, named = application(), dict[tuple[str, ...], dict[str, str]]()
    for document in sorted({*DOCUMENTS} - OF_EARLIER_COMMITS):
        for command in COMMAND.findall(re.sub(r"\\?\n +", " ", (ROOT / document).read_text("utf-8"))):
            words, path, node = command.split(), [], top
            while len(path) < len(words) and words[len(path)] in node:
                node = node[words[len(path)]]
                path.append(words[len(path)])
            assert path, f"{document}: hplm {command}"
            options = dict.fromkeys(re.findall(r"(?<=\s)--[a-z][a-z-]*", command.partition(" -- ")[0]), str(document))
            if path != ["bench"]:  # tests/bench has the benchmarks
                named.setdefault(tuple(path), {}).update(options)
    assert len(named) > 40
    for path, options in named.items():
        assert main([*path, "--help"]) == 0
        text = capsys.readouterr().out
        assert not {option: document for option, document in options.items() if option not in text}, path
