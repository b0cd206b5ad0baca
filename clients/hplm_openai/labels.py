"""The endpoints that answer with labels or pieces of text: those of Mistral, OpenAI, vLLM, TEI and Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hplm_client.answer import Answer, Row, Tenant
from hplm_openai.answers import in_list, named
from hplm_openai.errors import wrong
from hplm_openai.fields import MOST_TEXTS, Ask, Given, are_texts, choice, flag, shown, text, texts, whole

ALL = 65_535  # labels: the most that `top_k` takes
HOLDS = 0.5  # the probability from which on a label is flagged
OUTSIDE = "O"  # the tag of words that are in no entity


async def classifications(given: Given, tenant: Tenant, ask: Ask) -> Any:
    """Mistral's."""
    answers = await ask(texts=texts(given, "input"), top_k=ALL)
    return named("classify", tenant, results=[{tenant.name: {"scores": _scores(one)}} for one in answers])


async def moderations(given: Given, tenant: Tenant, ask: Ask) -> Any:
    """OpenAI's, with the tenant's labels as categories."""
    results: list[Any] = []
    for scores in map(_scores, await ask(texts=texts(given, "input"), top_k=ALL)):
        flags, applied = {label: score >= HOLDS for label, score in scores.items()}, {label: ["text"] for label in scores}
        result = {"flagged": any(flags.values()), "categories": flags, "category_scores": scores}
        results.append({**result, "category_applied_input_types": applied})
    return named("modr", tenant, results=results)


async def classify(given: Given, tenant: Tenant, ask: Ask) -> Any:
    """vLLM's. `probs` have the order of the tenant's labels."""
    is_raw, data = not flag(given, "use_activation", True), list[Any]()
    answers = await ask(texts=texts(given, "input"), top_k=ALL, logits=True, tokens=True)
    for number, answer in enumerate(answers):
        probs = [*(answer.rows[0].logits or ())]  # in this order; rows have that of their scores
        if not is_raw:
            by_rank = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)
            for place, row in zip(by_rank, answer.rows, strict=True):
                probs[place] = row.score
        data.append({"index": number, "label": answer.label, "probs": probs, "num_classes": len(probs)})
    return in_list("classify", tenant, data, answers)


async def predict(given: Given, tenant: Tenant, ask: Ask) -> Any:
    """TEI's. `inputs`: a text, a pair as a list of two texts, or a list of lists of one text each, or of two."""
    each, is_one = given.pop("inputs", None), False
    if isinstance(each, str) or (isinstance(each, list) and each and isinstance(each[0], str)):
        each, is_one = [[each] if isinstance(each, str) else each], True
    sizes = {len(one) if are_texts(one) else 0 for one in each} if isinstance(each, list) else set[int]()
    if sizes not in ({1}, {2}) or len(each) > MOST_TEXTS:
        forms = f"a text, a pair of texts, or a list of 1 to {MOST_TEXTS:,} lists of one text each, or of two"
        raise wrong(f"'inputs' is {shown(each)}: send {forms}", "inputs")
    firsts, *seconds = ([*column] for column in zip(*each, strict=True))
    is_raw = flag(given, "raw_scores")
    answers = await ask(texts=firsts, pairs=seconds[0] if seconds else None, top_k=ALL, logits=is_raw)
    found = [_ranked(answer, is_raw) for answer in answers]
    return found[0] if is_one else found


async def text_classification(given: Given, tenant: Tenant, ask: Ask) -> Any:
    most, usual = whole(given, "top_k", 1) or ALL, "softmax" if tenant.task == "classify" else "sigmoid"
    is_raw = choice(given, "function_to_apply", usual, "none") == "none"
    return [_ranked(answer, is_raw) for answer in await ask(texts=texts(given, "inputs"), top_k=most, logits=is_raw)]


async def token_classification(given: Given, tenant: Tenant, ask: Ask) -> Any:
    is_one, each = isinstance(given.get("inputs"), str), texts(given, "inputs")
    joins = given.pop("aggregation_strategy", "simple") != "none"  # each word has one label already
    ignored = given.pop("ignore_labels", [OUTSIDE])
    if not are_texts(ignored):
        raise wrong(f"'ignore_labels' is {shown(ignored)}: give a list of labels", "ignore_labels")
    answers = await ask(texts=each)
    found = [_entities(text, answer.rows, joins, ignored) for text, answer in zip(each, answers, strict=True)]
    return found[0] if is_one else found


async def question_answering(given: Given, tenant: Tenant, ask: Ask) -> Any:
    inputs = given.pop("inputs", None)
    each = [dict(one) if isinstance(one, dict) else {} for one in (inputs if isinstance(inputs, list) else [inputs])]
    if not 0 < len(each) <= MOST_TEXTS:
        raise wrong(f"'inputs' is a list of {len(each)} questions: send 1 to {MOST_TEXTS:,}", "inputs")
    questions, passages = [text(one, "question") for one in each], [text(one, "context") for one in each]
    choice(given, "top_k", 1)
    rows = [answer.rows[0] for answer in await ask(texts=questions, pairs=passages)]
    found = [{"answer": row.label, "score": row.score, "start": row.span[0], "end": row.span[1]} for row in rows]
    return found if isinstance(inputs, list) else found[0]


def _scores(answer: Answer) -> dict[str, float]:
    return {row.label: row.score for row in answer.rows}


def _ranked(answer: Answer, is_raw: bool) -> list[Any]:
    """Returns the labels, the likeliest first, with their scores or logits."""
    logits = sorted(answer.rows[0].logits or (), reverse=True)
    scores = logits if is_raw else [row.score for row in answer.rows]
    return [{"label": row.label, "score": score} for row, score in zip(answer.rows, scores, strict=False)]


def _entities(text: str, rows: Sequence[Row], joins: bool, ignored: list[str]) -> list[Any]:
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
