"""A model that does nothing: answers every text with four tensors, from a thread of its own."""

import json
import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.tokens = int(parameters["tokens"]["string_value"])
        self.waiting = queue.SimpleQueue()
        threading.Thread(target=self.answer, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            (text,) = request.inputs()
            self.waiting.put((request.get_response_sender(), len(text.as_numpy())))
        return [None] * len(requests)

    def answer(self):
        while True:
            sender, texts = self.waiting.get()
            tensors = {
                "ROWS": np.zeros((texts, self.tokens), dtype=np.int64),
                "SEGMENTS": np.zeros((texts, self.tokens), dtype=np.uint8),
                "SPANS": np.zeros((texts, 1, 3), dtype=np.int32),
                "TICKET": np.zeros((texts, 80), dtype=np.uint8),
            }
            response = pb_utils.InferenceResponse([pb_utils.Tensor(name, values) for name, values in tensors.items()])
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
