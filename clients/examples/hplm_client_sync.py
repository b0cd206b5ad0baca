"""hplm_client, blocking: one text with a deadline, then a batch.

python hplm_client_sync.py --url 127.0.0.1:8000 --tenant acme "some text" "another"
"""

import argparse

from hplm_client import DeadlineMissed, HplmClient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("texts", nargs="*", default=["some text", "another"])
parser.add_argument("--url", default="127.0.0.1:8000")
parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
parser.add_argument("--tenant", required=True)
parser.add_argument("--key", help="API key of the tenant")
parser.add_argument("--timeout", type=float, default=0.2, help="deadline of the first answer in seconds (default: %(default)s)")
args = parser.parse_args()

with HplmClient(args.url, protocol=args.protocol, api_key=args.key) as client:
    try:
        answer = client.infer(args.texts[0], tenant=args.tenant, deadline_ms=1000 * args.timeout)
        print(f"in time: {answer.label} ({answer.score:.3f}), version {answer.version}")
    except DeadlineMissed as error:
        print(f"too late: {error}")

    for text, answer in zip(args.texts, client.infer_batch(args.texts, tenant=args.tenant), strict=True):
        print(text)
        for row in answer.rows:
            start, end = row.span
            print(f"  {row.label or '-'}  {row.score:.3f}  {text[start:end]!r}")
