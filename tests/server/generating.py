"""Requests for generated text by plain clients: gRPC streams, and Triton's generate endpoints."""

import json
import queue

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.server.stock import posted
from tests.support.wait import PATIENCE

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
RETURN = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")}


class Asked:
    """A request on a gRPC stream of its own, by a plain tritonclient."""

    def __init__(self, server, prompt, tenant="", sampling=GREEDY, headers=None, timeout=None, parameters=None, **more):
        """`more`: further inputs. A prompt or sampling that is None is not sent."""
        self.said = queue.Queue()
        self.client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.said.put(error or result), headers=headers)
        given = {} if prompt is None else {"text_input": prompt}
        given |= {} if sampling is None else {"sampling_parameters": json.dumps(sampling)}
        self.client.async_stream_infer(
            "chat",
            [_tensor(name, value) for name, value in {**given, **more}.items()],
            timeout=timeout,
            parameters={"tenant": tenant, **(parameters or {})},
            enable_empty_final_response=True,
        )

    def piece(self):
        """Returns the next part of the answer, or None at its end. Raises its error."""
        result = self.said.get(timeout=PATIENCE)
        if isinstance(result, Exception):
            raise result
        response = result.get_response()
        self.is_last = response.parameters["triton_final_response"].bool_param
        return {output.name: result.as_numpy(output.name) for output in response.outputs}

    def pieces(self):
        found = [self.piece()]
        while not self.is_last:
            found.append(self.piece())
        self.client.stop_stream()
        assert self.said.empty()
        return found

    def error(self):
        """Returns the message of the error with which the answer ends."""
        with pytest.raises(InferenceServerException) as caught:
            self.pieces()
        self.client.stop_stream()
        assert self.said.empty(), "something was said behind the end"
        return caught.value.message()


def _tensor(name, value):
    array = np.array([value.encode() if isinstance(value, str) else value], dtype=object if isinstance(value, str) else bool)
    tensor = tritonclient.grpc.InferInput(name, [1], "BYTES" if isinstance(value, str) else "BOOL")
    tensor.set_data_from_numpy(array)
    return tensor


def post(server, way, model="chat", **body):
    """Returns the status and the answer of `generate` or `generate_stream`, whose events come as a list."""
    status, answer = posted(server, (model, way), json.dumps(body))
    if way == "generate":
        return status, json.loads(answer)
    return status, [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]


def text_of(pieces):
    return "".join(piece["text_output"][0].decode() for piece in pieces)


def ids_of(pieces):
    tokens = [token for piece in pieces for token in json.loads(piece["logprobs"][0])]
    return [int(id) for token in tokens for id in token]
