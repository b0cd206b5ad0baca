from __future__ import annotations

import json

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from loadtest.encode import infer_request

TEXTS = ["Zwei Wörter", "", "three words here"]


def test_an_infer_request_is_what_tritonclient_would_send() -> None:
    text = InferInput("TEXT", [3, 1], "BYTES").set_data_from_numpy(np.array(TEXTS, dtype=object).reshape(3, 1))
    outputs = [InferRequestedOutput("LABEL", binary_data=True)]
    theirs, their_length = InferenceServerClient.generate_request_body(
        [text], outputs=outputs, timeout=50_000, parameters={"tenant": "acme", "top_k": 2}
    )
    request = infer_request("minilm", TEXTS, "acme", outputs=["LABEL"], parameters={"timeout": 50_000, "top_k": 2})
    head, ours = request.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    fields = dict(line.split(": ") for line in lines[1:])
    our_length = int(fields["Inference-Header-Content-Length"])
    assert lines[0] == "POST /v2/models/minilm/infer HTTP/1.1"
    assert int(fields["Content-Length"]) == len(ours)
    assert json.loads(ours[:our_length]) == json.loads(theirs[:their_length])
    assert ours[our_length:] == theirs[their_length:]
