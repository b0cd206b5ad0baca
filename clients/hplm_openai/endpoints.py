"""The endpoints of encoders: what each one asks a tenant, and how it writes the answers. ENDPOINTS lists them."""

from __future__ import annotations

import math
import secrets
import struct
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hplm_client.answer import Answer, Row, Tenant
from hplm_openai.errors import Refused, wrong
from hplm_openai.fields import MOST_TEXTS, deadline_in, flag, given_in, priority_in, shown, text, texts, unknown, whole

GENERATE = "generate"
CHATS = ("/v1/chat/completions", "/v1/completions")
ALL = 65_535  # labels: the most that `top_k` takes
HOLDS = 0.5  # the probability from which on a label is flagged
OUTSIDE = "O"  # the tag of words that are in no entity
# Fields that are not supported, and values of them that ask for nothing.
NEUTRAL: dict[str, list[Any]] = {
    "add_special_tokens": [True], "padding": ["do_not_pad"], "truncation_side": ["right"], "truncate_prompt_tokens": [-1],
    "truncation_direction": ["right", "Right"], "handle_impossible_answer": [True, False],
}  # fmt: skip
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
Given = dict[str, Any]
Tasks = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """The arguments of our client that ask a tenant, and the function that writes the endpoint's answer from its answers."""

    asked: Mapping[str, Any]
    write: Callable[[list[Answer]], Any]


@dataclass(frozen=True)
class Endpoint:
    tasks: Tasks
    read: Callable[[Given, Tenant], Question]  # takes the fields that it knows

    def question(self, body: Mapping[str, Any], tenant: Tenant) -> Question:
        if not tenant.task:  # the server refuses it
            return Question({"texts": ["a"]}, list)
        given = given_in(body)
        given.pop("model", None)
        truncates = flag(given, "truncate") or given.get("truncate_prompt_tokens") == -1
        common = {"deadline_ms": deadline_in(given), "priority": priority_in(given), "truncate": truncates}
        question = self.read(given, tenant)
        for name, value in given.items():
            if value not in NEUTRAL.get(name, []):
                raise unknown(name, "leave it out")
        return replace(question, asked={**common, **question.asked})


def wrong_task(tenant: Tenant) -> Refused:
    paths = CHATS if tenant.task == GENERATE else [path for path, one in ENDPOINTS.items() if tenant.task in one.tasks]
    ways = ", ".join(f"POST {path.format(tenant=tenant.name)}" for path in paths)
    return wrong(f"the model {tenant.name!r} has the task {tenant.task}: ask it by {ways}", "model")


# Labels


def classifications(given: Given, tenant: Tenant) -> Question:
    """Mistral's."""

    def write(answers: list[Answer]) -> Any:
        results = [{tenant.name: {"scores": _scores(one)}} for one in answers]
        return {"id": _id("classify"), "model": tenant.name, "results": results}

    return Question({"texts": texts(given, "input"), "top_k": ALL}, write)


def moderations(given: Given, tenant: Tenant) -> Question:
    """OpenAI's, with the tenant's labels as categories."""

    def write(answers: list[Answer]) -> Any:
        results: list[Any] = []
        for scores in map(_scores, answers):
            flags, applied = ({label: score >= HOLDS for label, score in scores.items()}, {label: ["text"] for label in scores})
            result = {"flagged": any(flags.values()), "categories": flags, "category_scores": scores}
            results.append({**result, "category_applied_input_types": applied})
        return {"id": _id("modr"), "model": tenant.name, "results": results}

    return Question({"texts": texts(given, "input"), "top_k": ALL}, write)


def classify(given: Given, tenant: Tenant) -> Question:
    """vLLM's. `probs` have the order of the tenant's labels."""
    is_raw = not flag(given, "use_activation", True)

    def write(answers: list[Answer]) -> Any:
        data: list[Any] = []
        for number, answer in enumerate(answers):
            logits = [*(answer.rows[0].logits or ())]
            probs = logits if is_raw else _probabilities(logits, tenant)
            data.append({"index": number, "label": answer.label, "probs": probs, "num_classes": len(probs)})
        return _listed("classify", tenant, data, answers)

    return Question({"texts": texts(given, "input"), "top_k": 1, "logits": True, "tokens": True}, write)


def predict(given: Given, tenant: Tenant) -> Question:
    """TEI's. `inputs`: a text, a pair as a list of two texts, or a list of lists of one text each, or of two."""
    each, is_one = given.pop("inputs", None), False
    if isinstance(each, str) or (isinstance(each, list) and each and isinstance(each[0], str)):
        each, is_one = [[each] if isinstance(each, str) else each], True
    sizes = {len(one) if _are_texts(one) else 0 for one in each} if isinstance(each, list) else set[int]()
    if sizes not in ({1}, {2}) or len(each) > MOST_TEXTS:
        forms = f"a text, a pair of texts, or a list of 1 to {MOST_TEXTS:,} lists of one text each, or of two"
        raise wrong(f"'inputs' is {shown(each)}: send {forms}", "inputs")
    firsts, *seconds = ([*column] for column in zip(*each, strict=True))
    return _labels({"texts": firsts, "pairs": seconds[0] if seconds else None}, is_one, flag(given, "raw_scores"))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _labels(asked: Given, is_one: bool, is_raw: bool) -> Question:
    def write(answers: list[Answer]) -> Any:
        each: list[Any] = []
        for answer in answers:
            logits = sorted(answer.rows[0].logits or (), reverse=True)
            scores = logits if is_raw else [row.score for row in answer.rows]
            each.append([{"label": row.label, "score": score} for row, score in zip(answer.rows, scores, strict=False)])
        return each[0] if is_one else each

    return Question({"top_k": ALL, "logits": is_raw, **asked}, write)


def _scores(answer: Answer) -> dict[str, float]:
    return {row.label: row.score for row in answer.rows}


def _probabilities(logits: list[float], tenant: Tenant) -> list[float]:
    if tenant.task != "classify":
        return [*map(_sigmoid, logits)]
    most = max(logits)
    shifted = [math.exp(logit - most) for logit in logits]
    total = sum(shifted)
    return [one / total for one in shifted]


def _sigmoid(logit: float) -> float:
    return (1 + math.tanh(logit / 2)) / 2  # without an overflow


# Vectors


def embeddings(given: Given, tenant: Tenant, kind: str, field: str) -> Question:
    """OpenAI's and vLLM's, which call a vector's kind and field differently."""
    ids = given.get("input")
    if isinstance(ids, list) and ids and all(type(one) is int or isinstance(one, list) for one in ids):
        way = "send text (langchain-openai does with check_embedding_ctx_length=False)"
        raise wrong(f"'input' is token ids, and the model has a vocabulary of its own: {way}", "input")
    form = given.pop("encoding_format", "float")
    if form not in ("float", "base64"):
        raise wrong(f"'encoding_format' is {shown(form)}: give 'float' or 'base64'", "encoding_format")

    def write(answers: list[Answer]) -> Any:
        vectors = [answer.embedding or () for answer in answers]
        coded = [b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors] if form == "base64" else vectors
        data = [{"object": kind, "index": number, field: vector} for number, vector in enumerate(coded)]
        return _listed(kind, tenant, data, answers)

    return Question(_vectors(given, "input"), write)


def embed(given: Given, tenant: Tenant) -> Question:
    """TEI's, and Hugging Face's `feature-extraction`."""
    is_unit = flag(given, "normalize", True)

    def write(answers: list[Answer]) -> Any:
        vectors = [answer.embedding or () for answer in answers]
        return [*map(_scaled, vectors)] if is_unit else vectors

    return Question(_vectors(given, "inputs"), write)


def _scaled(vector: Sequence[float]) -> list[float]:
    """Returns a vector with the length 1."""
    length = math.hypot(*vector) or 1.0
    return [one / length for one in vector]


def _vectors(given: Given, name: str) -> Given:
    """Takes texts, and what a request may say about their vectors."""
    parameters: Given = {}
    if (dimensions := whole(given, "dimensions", 1)) is not None:
        parameters["dimensions"] = dimensions
    if "prompt_name" in given:
        parameters["hplm_prefix"] = text(given, "prompt_name")
    return {"texts": texts(given, name), "embedding": True, "tokens": True, "parameters": parameters}


# Pairs


def score(given: Given, tenant: Tenant) -> Question:
    """vLLM's. One text with each of several, or several pairs."""
    names = next((names for names in PAIRS if names[0] in given and names[1] in given), PAIRS[0])
    firsts, seconds = (texts(given, name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise wrong(f"{names[0]!r} has {len(firsts)} texts, {names[1]!r} {len(seconds)}: send one, or as many", names[0])
    is_raw = not flag(given, "use_activation", True)

    def write(answers: list[Answer]) -> Any:
        found = enumerate(_numbers(answers, is_raw))
        data = [{"index": number, "object": "score", "score": score} for number, score in found]
        return _listed("score", tenant, data, answers)

    return Question({"texts": firsts * (len(seconds) if len(firsts) == 1 else 1), "pairs": seconds, "tokens": True}, write)


def rerank(given: Given, tenant: Tenant, tells_documents: bool) -> Question:
    """Cohere's, Jina's and vLLM's; with `texts` instead of `documents` TEI's."""
    if "texts" in given:
        return _ranks(given)
    query, documents = text(given, "query"), given.get("documents")
    if isinstance(documents, list):  # of objects with a text, perhaps
        given["documents"] = [one.get("text") if isinstance(one, dict) else one for one in documents]
    documents, top_n = texts(given, "documents"), whole(given, "top_n", 0)
    tells_documents, is_raw = flag(given, "return_documents", tells_documents), not flag(given, "use_activation", True)

    def write(answers: list[Answer]) -> Any:
        results: list[Any] = []
        for number, score in _ranked(_numbers(answers, is_raw))[: top_n or None]:
            shown = {"document": {"text": documents[number]}} if tells_documents else {}
            results.append({"index": number, "relevance_score": score, **shown})
        return {"id": _id("rerank"), "model": tenant.name, "results": results, "usage": _usage(answers)}

    return Question({"texts": [query] * len(documents), "pairs": documents, "tokens": True}, write)


def _ranks(given: Given) -> Question:
    query, found = text(given, "query"), texts(given, "texts")
    is_raw, tells_texts = flag(given, "raw_scores"), flag(given, "return_text")

    def write(answers: list[Answer]) -> Any:
        ranked = _ranked(_numbers(answers, is_raw))
        return [
            {"index": number, "score": score, **({"text": found[number]} if tells_texts else {})} for number, score in ranked
        ]

    return Question({"texts": [query] * len(found), "pairs": found}, write)


def _numbers(answers: list[Answer], is_raw: bool) -> list[float]:
    """Returns the number of each pair, or its sigmoid, as the interfaces have it."""
    numbers = [float(answer.rows[0].label) for answer in answers]
    return numbers if is_raw else [*map(_sigmoid, numbers)]


def _ranked(scores: list[float]) -> list[tuple[int, float]]:
    return sorted(enumerate(scores), key=lambda one: -one[1])


# Hugging Face's interface


def pipeline(given: Given, tenant: Tenant) -> Question:
    """Asks as the tenant's pipeline in `transformers` does. A field of `parameters` may also stand beside `inputs`."""
    parameters, _ = given.pop("parameters", {}), given.pop("options", {})  # the latter say how a model is loaded
    if not isinstance(parameters, dict):
        raise wrong(f"'parameters' is {shown(parameters)}: send an object", "parameters")
    given.update(given_in(parameters))
    return PIPELINES[tenant.task](given, tenant)


def text_classification(given: Given, tenant: Tenant) -> Question:
    asked = {"texts": texts(given, "inputs"), "top_k": whole(given, "top_k", 1) or ALL}
    usual = "softmax" if tenant.task == "classify" else "sigmoid"
    function = given.pop("function_to_apply", usual)
    if function not in (usual, "none"):
        raise wrong(f"'function_to_apply' is {shown(function)}: give {usual!r} or 'none'", "function_to_apply")
    return _labels(asked, False, function == "none")


def token_classification(given: Given, tenant: Tenant) -> Question:
    is_one, each = isinstance(given.get("inputs"), str), texts(given, "inputs")
    joins = given.pop("aggregation_strategy", "simple") != "none"  # each word has one label already
    ignored = given.pop("ignore_labels", [OUTSIDE])
    if not _are_texts(ignored):
        raise wrong(f"'ignore_labels' is {shown(ignored)}: give a list of labels", "ignore_labels")

    def write(answers: list[Answer]) -> Any:
        found = [_entities(text, answer.rows, joins, ignored) for text, answer in zip(each, answers, strict=True)]
        return found[0] if is_one else found

    return Question({"texts": each}, write)


def _entities(text: str, rows: tuple[Row, ...], joins: bool, ignored: list[str]) -> list[Any]:
    """Returns words with their tags, or what neighbours with the same tag have together. `B-` begins another one."""
    groups: list[tuple[str, list[Row]]] = []
    for row in rows:
        name = row.label[2:] if row.label[:2] in ("B-", "I-") else row.label
        if joins and groups and groups[-1][0] == name and row.label[:2] != "B-":
            groups[-1][1].append(row)
        else:
            groups.append((name if joins else row.label, [row]))
    found: list[Any] = []
    for name, own in groups:
        start, end, score = own[0].span[0], own[-1].span[1], sum(row.score for row in own) / len(own)
        if name and name not in ignored:
            kind = "entity_group" if joins else "entity"
            found.append({kind: name, "score": score, "word": text[start:end], "start": start, "end": end})
    return found


def question_answering(given: Given, tenant: Tenant) -> Question:
    inputs = given.pop("inputs", None)
    each = [dict(one) if isinstance(one, dict) else {} for one in (inputs if isinstance(inputs, list) else [inputs])]
    if not 0 < len(each) <= MOST_TEXTS:
        raise wrong(f"'inputs' is a list of {len(each)} questions: send 1 to {MOST_TEXTS:,}", "inputs")
    asked = {"texts": [text(one, "question") for one in each], "pairs": [text(one, "context") for one in each]}
    if whole(given, "top_k", 1) not in (None, 1):
        raise unknown("top_k", "the one best answer is told, so leave it out")

    def write(answers: list[Answer]) -> Any:
        rows = [answer.rows[0] for answer in answers]
        found = [{"answer": row.label, "score": row.score, "start": row.span[0], "end": row.span[1]} for row in rows]
        return found if isinstance(inputs, list) else found[0]

    return Question(asked, write)


def _id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _listed(prefix: str, tenant: Tenant, data: list[Any], answers: list[Answer]) -> Any:
    head = {"id": _id(prefix), "object": "list", "created": int(time.time()), "model": tenant.name}
    return {**head, "data": data, "usage": _usage(answers)}


def _usage(answers: list[Answer]) -> dict[str, int]:
    tokens = sum(answer.tokens or 0 for answer in answers)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


PIPELINES: dict[str, Callable[[Given, Tenant], Question]] = {
    "classify": text_classification,
    "multilabel": text_classification,
    "tag": token_classification,
    "span": question_answering,
    "embed": embed,
}
OF_TENANT = "/models/{tenant}"  # also before another path, for clients that cannot name the tenant in another way
LABELS, PAIR, VECTOR = ("classify", "multilabel"), ("regress",), ("embed",)
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/embeddings": Endpoint(VECTOR, partial(embeddings, kind="embedding", field="embedding")),
    "/v1/classifications": Endpoint(LABELS, classifications),
    "/v1/moderations": Endpoint(LABELS, moderations),
    "/classify": Endpoint(LABELS, classify),
    "/predict": Endpoint(LABELS, predict),
    "/pooling": Endpoint(VECTOR, partial(embeddings, kind="pooling", field="data")),
    "/embed": Endpoint(VECTOR, embed),
    "/score": Endpoint(PAIR, score),
    "/rerank": Endpoint(PAIR, partial(rerank, tells_documents=True)),
    "/v1/rerank": Endpoint(PAIR, partial(rerank, tells_documents=True)),
    "/v2/rerank": Endpoint(PAIR, partial(rerank, tells_documents=False)),
    OF_TENANT: Endpoint(tuple(PIPELINES), pipeline),
}
