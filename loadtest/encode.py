"""Builds whole HTTP requests as bytes, once, to be sent many times."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

Parameter = str | int | bool


def http_request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Returns a POST request for a keep-alive connection. The host is only a name, because the server is on this machine."""
    fields = {"Host": "loadtest", "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("ascii") + body


def infer_request(
    model: str,
    texts: Sequence[str],
    tenant: str,
    *,
    outputs: Sequence[str] = ("LABEL", "SCORE"),
    parameters: Mapping[str, Parameter] | None = None,
) -> bytes:
    """Returns a request with texts for one tenant.

    It uses Triton's binary tensor extension, so that the server copies strings instead of parsing JSON. `parameters` are sent
    beside the tenant: `{"timeout": 50_000}` is a deadline of 50 ms, `{"top_k": 3}` requests three rows.
    """
    encoded = [text.encode() for text in texts]
    tensor = b"".join(struct.pack("<I", len(text)) + text for text in encoded)
    text_input = {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES"}
    header = {
        "inputs": [text_input | {"parameters": {"binary_data_size": len(tensor)}}],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        "parameters": {"tenant": tenant, "outputs": ",".join(outputs), **(parameters or {})},
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    fields = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return http_request(f"/v2/models/{model}/infer", head + tensor, fields)
