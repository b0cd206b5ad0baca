"""A fake backbone with the inputs and outputs of a real one. The first text of a request tells it what to do:

fail WORD HINT...     refuse with that word
flaky KEY N WORD      refuse N times for this key, then answer with the number of requests seen
raise                 fail as Python code fails
present KEY           answer with the number of requests that wait to meet others
meet KEY N            answer N requests with this key when all of them have arrived
parameters            answer with everything but the tensors that reached the server
anything else         answer with the text itself; tenant 'tagger' answers with a row a word, the word in upper case,
                      and finds no token in the word '~'
"""

import collections
import json
import re

import numpy as np
import triton_python_backend_utils as pb_utils

CODES = {"invalid_input": "INVALID_ARG", "no_tenant": "NOT_FOUND", "internal": "INTERNAL", "broken": "INTERNAL"}
CLASSES = 3


class TritonPythonModel:
    def initialize(self, args):
        self.seen = collections.Counter()
        self.waiting = collections.defaultdict(list)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            texts = [row[0].decode() for row in pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()]
            verb, *rest = texts[0].split(" ") if texts[0] else [""]
            if verb == "present":
                self.send(sender, self.answer(request, [str(len(self.waiting[rest[0]]))]))
            elif verb == "meet":
                self.meet(sender, self.answer(request, texts), *rest)
            elif verb == "raise":
                self.send(sender, refusal("no word for this", pb_utils.TritonError.INTERNAL))
            elif verb == "fail":
                self.send(sender, refusal(f"[{rest[0]}] as asked{' '.join(['', *rest[1:]])}", code(rest[0])))
            elif verb == "flaky":
                self.send(sender, self.flaky(request, *rest))
            elif verb == "parameters":
                facts = {"parameters": json.loads(request.parameters()), "timeout": request.timeout()}
                self.send(sender, self.answer(request, [json.dumps(facts)]))
            else:
                self.send(sender, self.answer(request, texts))

    def flaky(self, request, key, failures, word):
        self.seen[key] += 1
        if self.seen[key] <= int(failures):
            return refusal(f"[{word}] not yet, retry after 1 ms", code(word))
        return self.answer(request, [str(self.seen[key])])

    def meet(self, sender, response, key, number):
        self.waiting[key].append((sender, response))
        if len(self.waiting[key]) == int(number):
            for present in self.waiting.pop(key):
                self.send(*present)

    def answer(self, request, texts):
        parameters = json.loads(request.parameters())
        if parameters.get("tenant") in (None, "nobody"):
            return refusal("[no_tenant] no such tenant, or not yours", pb_utils.TritonError.NOT_FOUND)
        pair = pb_utils.get_input_tensor_by_name(request, "TEXT_PAIR")
        if pair is not None:
            texts = [f"{text}|{other[0].decode()}" for text, other in zip(texts, pair.as_numpy(), strict=True)]
        if parameters["tenant"] == "tagger":
            rows = [[("" if m[0] == "~" else m[0].upper(), m.span()) for m in re.finditer(r"\S+", t)] for t in texts]
        else:
            rows = [[(text, (0, len(text)))] * parameters.get("top_k", 1) for text in texts]
        return tensors(rows, 0.75 if parameters["tenant"] == "sure" else -1, parameters.get("hplm_rung", 1))

    def send(self, sender, response):
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def code(word):
    return getattr(pb_utils.TritonError, CODES.get(word, "UNAVAILABLE"))


def refusal(message, status):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, status))


def tensors(rows, confidence, level):
    """Texts with fewer rows are filled up with '', 0 and -1."""
    shape = (len(rows), max(map(len, rows)))
    labels = np.full(shape, "", dtype=np.object_)
    scores = np.zeros(shape, dtype=np.float32)
    logits = np.zeros((*shape, CLASSES), dtype=np.float32)
    spans = np.full((*shape, 2), -1, dtype=np.int32)
    for text, answers in enumerate(rows):
        for row, (label, span) in enumerate(answers):
            labels[text, row], spans[text, row] = label, span
            if label:
                scores[text, row], logits[text, row] = 1 / (1 + row), range(CLASSES)
    outputs = {"LABEL": labels, "SCORE": scores, "LOGITS": logits, "SPAN": spans}
    outputs["CONFIDENCE"] = np.full((len(rows), 1), confidence, dtype=np.float32)
    outputs["LEVEL"] = np.full((len(rows), 1), level, dtype=np.int32)
    outputs["VERSION"] = np.full((len(rows), 1), "v7", dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
