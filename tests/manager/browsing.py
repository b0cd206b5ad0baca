"""A browser of the console that runs no JavaScript."""

import re
from html import unescape

import httpx2

from manager.rendering import ROOT
from tests.support.wait import PATIENCE


class Browser:
    """Fills forms in as a browser does that runs no JavaScript."""

    def __init__(self, managed):
        self.managed, self.at = managed, f"http://{managed.url}"
        self.client = httpx2.Client(base_url=self.at, timeout=PATIENCE, follow_redirects=True)

    def get(self, path=ROOT, **more):
        return self.client.get(path, **more)

    def post(self, path, origin=None, files=None, **fields):
        return self.client.post(path, data=fields, files=files, headers={"origin": origin or self.at})

    def sign_in(self, owner="acme", secret=None):
        answer = self.post(f"{ROOT}/sign-in", key=secret or self.managed.secret(owner))
        assert answer.status_code == 200, said(answer)
        return self

    def train(self, says="text\n", **fields):
        """Returns the page of the new job."""
        files = {"training_file": ("train.jsonl", says), "validation_file": ("", b"")}  # none was chosen
        return self.post(f"{ROOT}/new", files=files, **{"model": "toy", "suffix": "", "best": "", "task": "", **fields})


def said(answer):
    """Returns a page's text, without its tags."""
    return " ".join(unescape(re.sub("<[^>]*>", " ", answer.text)).split())
