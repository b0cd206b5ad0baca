"""Whole HTTP requests as bytes, built once and sent many times."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

Parameter = str | int | bool


def http_request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST over a connection that stays open. The host is a name only: load is sent to a loopback server."""
    fields = {"Host": "loadtest", "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("ascii") + body


def json_request(path: str, body: bytes) -> bytes:
    return http_request(path, body, {"Content-Type": "application/json"})


def infer_request(
    model: str,
    texts: Sequence[str],
    tenant: str,
    *,
    outputs: Sequence[str] = ("LABEL", "SCORE"),
    parameters: Mapping[str, Parameter] | None = None,
    api_key: str | None = None,
) -> bytes:
    """Texts for one tenant, in Triton's binary tensor extension: the server copies strings instead of parsing JSON.

    `parameters` go beside the tenant: `{"timeout": 50_000}` is a deadline of 50 ms, `{"top_k": 3}` asks for three rows.
    """
    encoded = [text.encode() for text in texts]
    tensor = b"".join(struct.pack("<I", len(text)) + text for text in encoded)
    text_input = {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES"}
    header = {
        "inputs": [text_input | {"parameters": {"binary_data_size": len(tensor)}}],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        "parameters": {"tenant": tenant, **(parameters or {})},
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    fields = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    if api_key is not None:
        fields["Authorization"] = f"Bearer {api_key}"
    return http_request(f"/v2/models/{model}/infer", head + tensor, fields)
