"""Renders the console's templates, and sends them as pages that load and run nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from manager.rights import MANAGE, OPERATOR, Caller
from manager.site import ALLOWED, HEADERS

ROOT = "/console"
WIDTH, HEIGHT, EDGE = 600, 160, 8  # of a curve
SECURE = {
    **HEADERS, "referrer-policy": "same-origin",  # with none, browsers send no Origin
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
}  # fmt: skip


def page(
    name: str, caller: Caller | None, status: int = 200, headers: Mapping[str, str] | None = None, **shown: Any
) -> Response:
    role = caller.role if caller is not None else None
    rights = {"manages": role in ALLOWED[MANAGE], "operates": role == OPERATOR}
    return HTMLResponse(part(name, page=name, me=caller, **rights, **shown), status, {**SECURE, **(headers or {})})


def part(name: str, **shown: Any) -> str:
    """Returns the text of a template."""
    return TEMPLATES.get_template(f"{name}.html").render(**shown)


def to(path: str) -> RedirectResponse:
    """Leads to a path of the console."""
    return RedirectResponse(f"{ROOT}{path}", 303, SECURE)


def _when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else ""


def _curve(exams: Sequence[Mapping[str, float]], name: str, among: Sequence[str]) -> str:
    """Returns the points of a line through the values of this name. The scale fits all names of `among`."""
    values = [exam[one] for exam in exams for one in among]
    low, high, last = min(values), max(values), max(exam["step"] for exam in exams)
    low, high = (low, high) if low < high else (low - 1, high + 1)  # a level line is in the middle

    def place(exam: Mapping[str, float]) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * exam["step"] / (last or 1)
        y = HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (exam[name] - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    return " ".join(map(place, exams))


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
TEMPLATES.globals |= {"root": ROOT, "curve": _curve}
TEMPLATES.filters["when"] = _when
