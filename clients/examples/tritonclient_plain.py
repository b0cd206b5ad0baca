"""Plain tritonclient over HTTP or gRPC, no wrapper.

python tritonclient_plain.py --url 127.0.0.1:8000 --tenant acme "some text" "another"
"""

import argparse
import importlib

import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("texts", nargs="*", default=["some text", "another"])
parser.add_argument("--url", default="127.0.0.1:8000")
parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
parser.add_argument("--backbone", default="minilm")
parser.add_argument("--tenant", required=True)
parser.add_argument("--key", help="API key of the tenant")
parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the answer (default: %(default)s)")
args = parser.parse_args()

library = importlib.import_module(f"tritonclient.{args.protocol}")  # both have the same classes
batch = np.array([[text.encode()] for text in args.texts], dtype=np.object_)  # one column: [texts, 1]
texts = library.InferInput("TEXT", list(batch.shape), "BYTES")
texts.set_data_from_numpy(batch)
outputs = ("LABEL", "SCORE", "SPAN")  # without LOGITS and others
is_http = args.protocol == "http"  # whose client has the limit; gRPC has none of its own, so each call needs it

with library.InferenceServerClient(args.url, **({"network_timeout": args.timeout} if is_http else {})) as client:
    result = client.infer(
        args.backbone,
        [texts],
        outputs=[library.InferRequestedOutput(name) for name in outputs],
        parameters={"tenant": args.tenant, "outputs": ",".join(outputs)},  # here too, because no model sees the line above
        timeout=200_000,  # the deadline in microseconds; without it, the tenant's default
        headers={  # in lower case, which gRPC requires; proxies read the tenant's name here
            "hplm-tenant": args.tenant,
            **({"authorization": f"Bearer {args.key}"} if args.key else {}),
        },
        **({} if is_http else {"client_timeout": args.timeout}),
    )

labels, scores, spans = (result.as_numpy(name) for name in outputs)
for number, text in enumerate(args.texts):
    print(text)
    for label, score, (start, end) in zip(labels[number], scores[number], spans[number], strict=True):
        if start >= 0:  # rows that fill short answers up to the longest have the span -1, -1
            print(f"  {label.decode() or '-'}  {score:.3f}  {text[start:end]!r}")
