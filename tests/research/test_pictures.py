"""The pictures of the docs: one command draws them, always the same, and the docs link to files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from research.pictures.__main__ import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
NAMES = {"architecture.svg", "request.svg", "tenants.svg", "overload.svg"}
LINK = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def texts_of(picture: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_one_command_draws_all_pictures_always_the_same(tmp_path, capsys) -> None:
    main(["--to", str(tmp_path / "first")])
    assert {Path(line).name for line in capsys.readouterr().out.splitlines()} == NAMES
    main(["--to", str(tmp_path / "second")])
    for name in NAMES:
        drawn = (tmp_path / "first" / name).read_bytes()
        assert drawn == (tmp_path / "second" / name).read_bytes() and b"<dc:date>" not in drawn
        # Their bytes are not compared, because versions of matplotlib place things differently.
        assert texts_of(tmp_path / "first" / name) == texts_of(PICTURES / name), f"{name}: run `python -m research.pictures`"


def test_every_picture_that_a_page_links_to_exists() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("research/**/*.md")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert {Path(link).name for _, link in links} >= NAMES
    assert not [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()]
    shown = {(page.parent / link).resolve() for page, link in links}
    assert not [picture.name for picture in PICTURES.iterdir() if picture.resolve() not in shown]
