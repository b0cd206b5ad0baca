"""A fake of Triton behind a router or a door, over HTTP and gRPC. It holds requests until it may answer them."""

from __future__ import annotations

import threading
from collections import Counter, deque

import grpc
from tritonclient.grpc import service_pb2

from hplm.errors import RESEND
from tests.support.fakes import Asked, FakeEndpoints
from tests.support.wait import PATIENCE

PROBED = b'"hplm_probe":true'


class FakeServer(FakeEndpoints):
    def __init__(self, name: str, larger_than: int = -1) -> None:
        """Only requests of more than so many bytes are counted and held."""
        self.name = name
        self.tenants: Counter[str | None] = Counter()  # by the header that arrived
        self.headers: deque[dict[str, str]] = deque(maxlen=10)  # of the last requests, or their metadata
        self.refusal, self.status = "", 503  # what all requests but probes are answered
        self.drains = False  # probes get 503
        self.probed: set[str] = set()  # paths
        self.dead: set[str] = set()  # models whose probes fail
        self.sizes: list[int] = []  # in the order of arrival
        self.count = 0  # requests that it holds
        self._larger_than = larger_than
        self._changed = threading.Condition()
        self._may_answer, self._answered = True, 0
        self._reached = threading.Event()
        self._reached.set()
        super().__init__()

    def cut(self) -> None:
        """Is as good as cut off by the network over HTTP: nobody is told or answered, and connections stay open."""
        self._reached.clear()

    def mend(self) -> None:
        self._reached.set()

    def close(self) -> None:
        self.mend()
        self.release()
        super().close()

    def hold(self) -> None:
        """Holds requests from now on, and forgets those before."""
        with self._changed:
            self.sizes.clear()
            self._may_answer, self._answered = False, 0

    def release(self) -> None:
        with self._changed:
            self._may_answer = True
            self._changed.notify_all()

    def answer_first(self) -> None:
        with self._changed:
            self._answered += 1
            self._changed.notify_all()

    def take(self, headers: dict[str, str], size: int) -> None:
        with self._changed:
            self.headers.append(headers)
            self.tenants[headers.get("hplm-tenant")] += 1
            if size > self._larger_than:
                self.count += 1
                self.sizes.append(size)
                mine = len(self.sizes)
                self._changed.wait_for(lambda: self._may_answer or mine <= self._answered, PATIENCE)
                self.count -= 1

    def over_http(self, asked: Asked) -> None:
        assert self._reached.wait(PATIENCE)
        if PROBED in asked.body:
            self.probed.add(asked.path)
            is_dead = self.drains or asked.path.split("/")[3] in self.dead
            asked.say(*(503, {"error": "[draining] the server is being stopped"}) if is_dead else (200, {}))
            return
        self.take(asked.headers, len(asked.body))
        said = {"error": self.refusal} if self.refusal else {"replica": self.name, "path": asked.path, "bytes": len(asked.body)}
        moves = "[draining]" in self.refusal and RESEND in asked.headers
        asked.say(501 if moves else self.status if self.refusal else 200, said)

    def ModelInfer(self, request, context):
        self.take(dict(context.invocation_metadata()), request.ByteSize())
        if self.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        return service_pb2.ModelInferResponse(model_name=self.name)

    def ModelStreamInfer(self, request_iterator, context):
        answer = service_pb2.ModelInferResponse(model_name=self.name)
        for number, _ in enumerate(request_iterator):
            if not number:  # a proxy may begin a stream that it then refuses
                self.take(dict(context.invocation_metadata()), 0)
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)
