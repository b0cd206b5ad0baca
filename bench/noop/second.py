"""A model that does nothing: takes the tensor, and answers with a label and a score, from four threads or from `execute`."""

import json
import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.at_once = parameters["answers"]["string_value"] == "floor"
        self.waiting = queue.SimpleQueue()
        if not self.at_once:
            for _ in range(4):
                threading.Thread(target=self.answer, daemon=True).start()

    def execute(self, requests):
        taken = [len(ticket.as_numpy()) for request in requests for ticket in request.inputs()]
        if self.at_once:
            return [answer_of(texts) for texts in taken]
        for request, texts in zip(requests, taken, strict=True):
            self.waiting.put((request.get_response_sender(), texts))
        return [None] * len(requests)

    def answer(self):
        while True:
            sender, texts = self.waiting.get()
            sender.send(answer_of(texts), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def answer_of(texts):
    label = pb_utils.Tensor("LABEL", np.full((texts, 1), b"label", dtype=object))
    score = pb_utils.Tensor("SCORE", np.ones((texts, 1), dtype=np.float32))
    return pb_utils.InferenceResponse([label, score])
