"""The life of a request, as docs/architecture.md numbers its steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from research.pictures.diagram import Box, Diagram

LANES = {  # and where the middle of each is
    "client": 82.0, "lookup": 252.0, "queue": 424.0, "staging": 540.0, "computing": 650.0, "answering": 762.0,
}  # fmt: skip
STEPS = (  # lane and words
    ("client", "posts a text\nfor its tenant"),
    ("lookup", "checks tenant\nand key"),
    ("lookup", "finds the rows\nof its tokens"),
    ("lookup", "signs a ticket\nwith addresses"),
    ("queue", "admits texts,\nor refuses"),
    ("staging", "chooses the\nnext batch"),
    ("staging", "gathers rows,\nfills slots"),
    ("computing", "runs the\nupper layers"),
    ("answering", "sends labels,\nscores, spans"),
)
FAILED = "A failure at any step becomes the answer. Every request gets exactly one."
WIDTH, HEIGHT, TOP, ROW = 148.0, 42.0, 50.0, 51.0
NUMBER, FAILURE, ROOM, ROOM_EDGE = "#1b6ca8", "#b23a48", "#f7f7f7", "#cccccc"


def draw(path: Path) -> None:
    bottom = TOP + len(STEPS) * ROW + 54
    diagram = Diagram(850, bottom)
    diagram.box((166, 4, 172, bottom - 10), edge=ROOM_EDGE, fill=ROOM)
    diagram.box((344, 4, 502, bottom - 10), edge=ROOM_EDGE, fill=ROOM)
    diagram.text((595, 18), "upper: its queue and threads", align="center", bold=1)
    for lane, middle in LANES.items():
        rooms = lane in ("client", "lookup")
        diagram.text((middle, 18 if rooms else 36), lane, align="center", bold=int(rooms))
    places = [_place(number) for number in range(len(STEPS))]
    for (left, top, width, height), (next_left, next_top, *_) in pairwise(places):
        middle, level = next_left + width / 2, top + height / 2
        corners = [(left + width, level), (middle, level)] if next_left > left else [(middle, top + height)]
        diagram.arrow(*corners, (middle, next_top))
    for number, (place, (_, words)) in enumerate(zip(places, STEPS, strict=True), 1):
        diagram.box(place)
        _number(diagram, place[0] + 18, place[1] + place[3] / 2, number)
        diagram.text((place[0] + 34, place[1] + 13), words)
    client, last = places[0], places[-1]
    answered = last[1] + last[3] / 2
    diagram.arrow((last[0], answered), (client[0] + 90, answered), (client[0] + 90, client[1] + client[3]))
    failed = answered + 50
    diagram.arrow((762, failed), (client[0] + 40, failed), (client[0] + 40, client[1] + client[3]), color=FAILURE, dashed=True)
    _number(diagram, 192, failed - 15, 10)
    diagram.text((210, failed - 15), FAILED, color=FAILURE)
    diagram.save(path)


def _place(step: int) -> Box:
    return LANES[STEPS[step][0]] - WIDTH / 2, TOP + step * ROW, WIDTH, HEIGHT


def _number(diagram: Diagram, x: float, y: float, number: int) -> None:
    diagram.text((x, y), str(number), size=15, color=NUMBER, align="center", bold=1)
