"""`hplm infer`: sends one text through hplm_client and prints the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hplm.cli.client import LOCAL, Connection
from hplm.cli.options import Json, Text

if TYPE_CHECKING:
    from hplm_client import Answer

WIDEST_EXCERPT = 48


def infer(
    text: str, /, *, tenant: str, pair: Text | None = None, deadline_ms: float | None = None, top_k: int | None = None,
    truncate: bool = False, rung: int | None = None, backbone: str | None = None, connection: Connection = LOCAL,
    json: Json = False,
) -> dict[str, Any]:  # fmt: skip
    """Send a text to a running server.

    :param text: the text to send; after --, it may begin with a dash
    :param tenant: the tenant that answers
    :param pair: second text, for tenants that read two
    :param deadline_ms: time in which the answer must come (default: the tenant's own)
    :param top_k: return so many of the best labels instead of one
    :param truncate: cut a text that is too long, instead of refusing it
    :param rung: answer by this rung of the tenant, 1 is the dearest, and say which level has answered (default: by load)
    :param backbone: name of the backbone (default: the only one of the server; the front door does not tell it)
    """
    asked = {"tenant": tenant, "pair": pair, "deadline_ms": deadline_ms, "top_k": top_k, "truncate": truncate, "rung": rung}
    with connection.client(backbone) as client:
        answer = client.infer(text, **asked, confidence=True, level=rung is not None)
    print(table(answer, text if pair is None else None))
    sure = f", confidence {answer.confidence:.4f}" if answer.confidence is not None else ""
    level = f", level {answer.level}" if answer.level is not None else ""
    print(f"tenant {tenant}, version {answer.version}{level}{sure}")
    return {
        "tenant": tenant,
        "label": answer.label,
        "score": answer.score,
        "rows": [{"label": row.label, "score": row.score, "span": list(row.span)} for row in answer.rows],
        "version": answer.version,
        "confidence": answer.confidence,
        "level": answer.level,
    }


def table(answer: Answer, text: str | None) -> str:
    """Returns aligned columns. For a pair there are no excerpts: the task decides which of the two texts spans refer to."""
    if not answer.rows:
        return "no labels"
    lines = [("LABEL", "SCORE", "SPAN", "TEXT" if text is not None else "")]
    for row in answer.rows:
        start, end = row.span
        excerpt = " ".join(text[start:end].split()) if text is not None else ""
        if len(excerpt) > WIDEST_EXCERPT:
            excerpt = excerpt[: WIDEST_EXCERPT - 1] + "…"
        lines.append((row.label or "-", f"{row.score:.4f}", f"{start}-{end}", excerpt))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        f"{label:<{widths[0]}}  {score:>{widths[1]}}  {span:>{widths[2]}}  {excerpt}".rstrip()
        for label, score, span, excerpt in lines
    )
