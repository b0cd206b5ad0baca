"""Plain tritonclient over HTTP or gRPC, no wrapper. HPLM_API_KEY may hold the tenant's key.

python tritonclient_plain.py http 127.0.0.1:8000 minilm acme "some text" "another"
"""

import importlib
import os
import sys

import numpy as np

protocol, url, backbone, tenant, *given = sys.argv[1:]
key, seconds = os.environ.get("HPLM_API_KEY"), 60.0

library = importlib.import_module(f"tritonclient.{protocol}")  # both have the same classes
batch = np.array([[text.encode()] for text in given], dtype=np.object_)  # one column: [texts, 1]
texts = library.InferInput("TEXT", list(batch.shape), "BYTES")
texts.set_data_from_numpy(batch)
outputs = ("LABEL", "SCORE", "SPAN")  # without LOGITS and others
is_http = protocol == "http"  # whose client has the limit; gRPC has none of its own, so each call needs it

with library.InferenceServerClient(url, **({"network_timeout": seconds} if is_http else {})) as client:
    result = client.infer(
        backbone,
        [texts],
        outputs=[library.InferRequestedOutput(name) for name in outputs],
        parameters={"tenant": tenant, "outputs": ",".join(outputs)},  # here too, because no model sees the line above
        timeout=200_000,  # the deadline in microseconds; without it, the tenant's default
        headers={  # in lower case, which gRPC requires; proxies read the tenant's name here
            "hplm-tenant": tenant,
            **({"authorization": f"Bearer {key}"} if key else {}),
        },
        **({} if is_http else {"client_timeout": seconds}),
    )

labels, scores, spans = (result.as_numpy(name) for name in outputs)
for number, text in enumerate(given):
    print(text)
    for label, score, (start, end) in zip(labels[number], scores[number], spans[number], strict=True):
        if start >= 0:  # rows that fill short answers up to the longest have the span -1, -1
            print(f"  {label.decode() or '-'}  {score:.3f}  {text[start:end]!r}")
