"""hplm_client with asyncio: many requests at once, each with its own result.

python hplm_client_async.py --url 127.0.0.1:8000 --tenant acme "some text" "another"
"""

import argparse
import asyncio

from hplm_client import Answer, AsyncHplmClient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("texts", nargs="*", default=["some text", "another"])
parser.add_argument("--url", default="127.0.0.1:8000")
parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
parser.add_argument("--tenant", required=True)
parser.add_argument("--key", help="API key of the tenant")
parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for each answer (default: %(default)s)")
args = parser.parse_args()


async def main() -> None:
    async with AsyncHplmClient(args.url, args.protocol, api_key=args.key, network_timeout=args.timeout) as client:
        requests = [client.infer(text, tenant=args.tenant) for text in args.texts]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
    for text, outcome in zip(args.texts, outcomes, strict=True):
        print(f"{text}: {' '.join(outcome.labels) if isinstance(outcome, Answer) else outcome}")


asyncio.run(main())
