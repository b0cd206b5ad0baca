"""The running system, and where the three kinds of knowledge are."""

from __future__ import annotations

from pathlib import Path

from research.pictures.diagram import QUIET, Box, Diagram

GENERAL, DOMAIN, TASK = "#1b6ca8", "#b36b00", "#2f7d4f"
PALE = {GENERAL: "#e8f1f8", DOMAIN: "#fdf1e0", TASK: "#e6f3eb"}
TRITON = "Triton: the ensemble <backbone>"
CLIENT = "client\ntext, tenant,\ntimeout"
LOOKUP = """\
<backbone>-lookup
checks tenant and key,
tokenises the text,
finds each token's row
in the domain's tables"""
UPPER = """\
<backbone>-upper
queue: admits, chooses a batch
staging: gathers rows, fills slots
engine: runs the upper layers,
each text with its own adapter"""
NOTE = "Sizes are those of BERT-base in the comparison. A table's size depends on its corpus."


def draw(path: Path, shared_mb: float, table_mb: float, tenant_mb: float) -> None:
    """The three costs are those of BERT-base in the comparison."""
    diagram = Diagram(800, 404)
    diagram.box((150, 44, 644, 160), edge=QUIET, fill="#f7f7f7")
    diagram.text((164, 62), TRITON, bold=1)
    diagram.box((6, 86, 112, 76))
    diagram.text((62, 108), CLIENT, align="center", bold=1)
    diagram.box((164, 78, 228, 112))
    diagram.text((176, 98), LOOKUP, bold=1)
    diagram.box((500, 78, 280, 112))
    diagram.text((512, 98), UPPER, bold=1)
    diagram.arrow((118, 132), (164, 132))
    diagram.arrow((392, 132), (500, 132))
    diagram.text((446, 104), "addresses\nof rows", align="center")
    diagram.text((446, 147), "a ticket", align="center")
    diagram.arrow((640, 78), (640, 22), (62, 22), (62, 86))
    diagram.text((72, 35), "labels, scores, spans")

    words = f"lower layers, computed in\nadvance into n-gram tables,\nmapped files: {table_mb:.1f} MB,\n"
    words += "shared by a domain's tenants"
    _knowledge(diagram, (164, 254, 228, 112), DOMAIN, "domain knowledge", words)
    words = f"upper layers\non the device,\none copy: {shared_mb:.1f} MB,\nshared by all tenants"
    _knowledge(diagram, (410, 254, 182, 112), GENERAL, "general knowledge", words)
    words = f"adapters and heads\nin slots on the device,\na tenant: {tenant_mb:.2f} MB,\nnot shared"
    _knowledge(diagram, (610, 254, 184, 112), TASK, "task knowledge", words)
    diagram.arrow((240, 254), (240, 190), color=DOMAIN)
    diagram.text((248, 228), "addresses", color=DOMAIN)
    diagram.arrow((370, 254), (370, 229), (520, 229), (520, 190), color=DOMAIN)
    diagram.text((430, 217), "vectors", color=DOMAIN)
    diagram.arrow((550, 254), (550, 190), color=GENERAL)
    diagram.text((558, 217), "weights", color=GENERAL)
    diagram.arrow((700, 254), (700, 190), color=TASK)
    diagram.text((708, 217), "records", color=TASK)
    diagram.text((479, 386), NOTE, align="center")
    diagram.save(path)


def _knowledge(diagram: Diagram, box: Box, color: str, title: str, words: str) -> None:
    diagram.box(box, edge=color, fill=PALE[color])
    diagram.text((box[0] + 12, box[1] + 20), title, size=13, color=color, bold=1)
    diagram.text((box[0] + 12, box[1] + 42), words)
