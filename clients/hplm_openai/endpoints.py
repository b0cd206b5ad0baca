"""The endpoints that answer requests: for which tasks each is, and who answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hplm_client.answer import Answer, Tenant
from hplm_openai import labels, numbers
from hplm_openai.answers import AnswerWriter, ChatWriter, CompletionWriter
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import Ask, Given, check_no_other, given_in, ours, shown
from hplm_openai.requests import read_chat, read_completion

Tasks = tuple[str, ...]


@dataclass(frozen=True)
class Writing:
    """An endpoint of decoders."""

    read: Callable[[Mapping[str, Any], int], list[CompletionRequest]]
    writer: type[AnswerWriter]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of encoders."""

    tasks: Tasks
    use: Callable[[Given, Tenant, Ask], Awaitable[Any]]  # takes the fields that it knows

    async def answer(self, body: Mapping[str, Any], tenant: Tenant, ask: Ask) -> Any:
        given = given_in(body)
        more = ours(given)

        async def ask_if_known(**asked: Any) -> list[Answer]:
            check_no_other(given)
            return await ask(**more, **asked)

        return await self.use(given, tenant, ask_if_known)


async def pipeline(given: Given, tenant: Tenant, ask: Ask) -> Any:
    """Asks as the tenant's pipeline in `transformers` does. A field of `parameters` may also stand beside `inputs`."""
    parameters, _ = given.pop("parameters", {}), given.pop("options", {})  # the latter say how a model is loaded
    if not isinstance(parameters, dict):
        raise wrong(f"'parameters' is {shown(parameters)}: send an object", "parameters")
    given.update(given_in(parameters))
    return await PIPELINES[tenant.task](given, tenant, ask)


def wrong_task(tenant: Tenant) -> Refused:
    paths = CHATS if tenant.task in WRITES else [path for path, one in ENDPOINTS.items() if tenant.task in one.tasks]
    ways = ", ".join(f"POST {path.format(tenant=tenant.name)}" for path in paths)
    return wrong(f"the model {tenant.name!r} has the task {tenant.task}: ask it by {ways}", "model")


PIPELINES: dict[str, Callable[[Given, Tenant, Ask], Awaitable[Any]]] = {
    "classify": labels.text_classification,
    "multilabel": labels.text_classification,
    "tag": labels.token_classification,
    "span": labels.question_answering,
    "embed": numbers.embed,
}
OF_TENANT = "/models/{tenant}"  # also before another path, for clients that cannot name the tenant in another way
WRITES, LABELS, PAIR, VECTOR = ("generate",), ("classify", "multilabel"), ("regress",), ("embed",)
CHATS = {
    "/v1/chat/completions": Writing(read_chat, ChatWriter),
    "/v1/completions": Writing(read_completion, CompletionWriter),
}
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/embeddings": Endpoint(VECTOR, partial(numbers.embeddings, kind="embedding", field="embedding")),
    "/v1/classifications": Endpoint(LABELS, labels.classifications),
    "/v1/moderations": Endpoint(LABELS, labels.moderations),
    "/classify": Endpoint(LABELS, labels.classify),
    "/predict": Endpoint(LABELS, labels.predict),
    "/pooling": Endpoint(VECTOR, partial(numbers.embeddings, kind="pooling", field="data")),
    "/embed": Endpoint(VECTOR, numbers.embed),
    "/score": Endpoint(PAIR, numbers.score),
    "/rerank": Endpoint(PAIR, partial(numbers.rerank, tells_documents=True)),
    "/v1/rerank": Endpoint(PAIR, partial(numbers.rerank, tells_documents=True)),
    "/v2/rerank": Endpoint(PAIR, partial(numbers.rerank, tells_documents=False)),
    OF_TENANT: Endpoint(tuple(PIPELINES), pipeline),
}
