"""The endpoints that answer with numbers: vectors of texts, and scores of pairs."""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from hplm_client.answer import Answer, Tenant
from hplm_openai.answers import in_list, named, usage
from hplm_openai.errors import wrong
from hplm_openai.fields import Ask, Given, choice, flag, text, texts, whole

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def embeddings(given: Given, tenant: Tenant, ask: Ask, kind: str, field: str) -> Any:
    """OpenAI's and vLLM's, which call a vector's kind and field differently."""
    ids = given.get("input")
    if isinstance(ids, list) and ids and all(type(one) is int or isinstance(one, list) for one in ids):
        way = "send text (langchain-openai does with check_embedding_ctx_length=False)"
        raise wrong(f"'input' is token ids, and the model has a vocabulary of its own: {way}", "input")
    form = choice(given, "encoding_format", "float", "base64")
    answers = await ask(**_vectors(given, "input"))
    vectors: list[Any] = [answer.embedding or () for answer in answers]
    if form == "base64":
        vectors = [b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors]
    data = [{"object": kind, "index": number, field: vector} for number, vector in enumerate(vectors)]
    return in_list(kind, tenant, data, answers)


async def embed(given: Given, tenant: Tenant, ask: Ask) -> Any:
    """TEI's, and Hugging Face's `feature-extraction`."""
    is_unit = flag(given, "normalize", True)
    vectors = [answer.embedding or () for answer in await ask(**_vectors(given, "inputs"))]
    return [*map(_scaled, vectors)] if is_unit else vectors


def _scaled(vector: Sequence[float]) -> list[float]:
    """Returns a vector with the length 1."""
    length = math.hypot(*vector) or 1.0
    return [one / length for one in vector]


def _vectors(given: Given, name: str) -> dict[str, Any]:
    """Takes texts, and what a request may say about their vectors."""
    parameters: dict[str, Any] = {}
    if (dimensions := whole(given, "dimensions", 1)) is not None:
        parameters["dimensions"] = dimensions
    if "prompt_name" in given:
        parameters["hplm_prefix"] = text(given, "prompt_name")
    return {"texts": texts(given, name), "embedding": True, "tokens": True, "parameters": parameters}


async def score(given: Given, tenant: Tenant, ask: Ask) -> Any:
    """vLLM's. One text with each of several, or several pairs."""
    names = next((names for names in PAIRS if names[0] in given and names[1] in given), PAIRS[0])
    firsts, seconds = (texts(given, name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise wrong(f"{names[0]!r} has {len(firsts)} texts, {names[1]!r} {len(seconds)}: send one, or as many", names[0])
    is_raw = not flag(given, "use_activation", True)
    answers = await ask(texts=firsts * (len(seconds) // len(firsts)), pairs=seconds, tokens=True)
    found = enumerate(_numbers(answers, is_raw))
    data = [{"index": number, "object": "score", "score": score} for number, score in found]
    return in_list("score", tenant, data, answers)


async def rerank(given: Given, tenant: Tenant, ask: Ask, tells_documents: bool) -> Any:
    """Cohere's, Jina's and vLLM's; with `texts` instead of `documents` TEI's."""
    if "texts" in given:
        return await _ranks(given, ask)
    query, documents = text(given, "query"), given.get("documents")
    if isinstance(documents, list):  # of objects with a text, perhaps
        given["documents"] = [one.get("text") if isinstance(one, dict) else one for one in documents]
    documents, top_n = texts(given, "documents"), whole(given, "top_n", 0)
    tells_documents, is_raw = flag(given, "return_documents", tells_documents), not flag(given, "use_activation", True)
    answers = await ask(texts=[query] * len(documents), pairs=documents, tokens=True)
    results = [
        {"index": place, "relevance_score": score, **({"document": {"text": documents[place]}} if tells_documents else {})}
        for place, score in _ranked(answers, is_raw)[: top_n or None]
    ]
    return named("rerank", tenant, results=results, usage=usage(answers))


async def _ranks(given: Given, ask: Ask) -> Any:
    query, each = text(given, "query"), texts(given, "texts")
    is_raw, tells_texts = flag(given, "raw_scores"), flag(given, "return_text")
    ranked = _ranked(await ask(texts=[query] * len(each), pairs=each), is_raw)
    return [{"index": place, "score": score, **({"text": each[place]} if tells_texts else {})} for place, score in ranked]


def _ranked(answers: list[Answer], is_raw: bool) -> list[tuple[int, float]]:
    return sorted(enumerate(_numbers(answers, is_raw)), key=lambda one: -one[1])


def _numbers(answers: list[Answer], is_raw: bool) -> list[float]:
    """Returns the number of each pair, or its sigmoid, as the interfaces have it."""
    numbers = [float(answer.rows[0].label) for answer in answers]
    return numbers if is_raw else [(1 + math.tanh(one / 2)) / 2 for one in numbers]  # without an overflow
