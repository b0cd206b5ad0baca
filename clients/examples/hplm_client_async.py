"""hplm_client with asyncio: many requests at once, each with its own result. HPLM_API_KEY may hold the tenant's key.

python hplm_client_async.py 127.0.0.1:8000 acme "some text" "another"
"""

import asyncio
import os
import sys

from hplm_client import Answer, AsyncHplmClient


async def main(url: str, tenant: str, *texts: str) -> None:
    async with AsyncHplmClient(url, api_key=os.environ.get("HPLM_API_KEY")) as client:
        requests = [client.infer(text, tenant=tenant) for text in texts]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
    for text, outcome in zip(texts, outcomes, strict=True):
        print(f"{text}: {' '.join(outcome.labels) if isinstance(outcome, Answer) else outcome}")


asyncio.run(main(*sys.argv[1:]))
