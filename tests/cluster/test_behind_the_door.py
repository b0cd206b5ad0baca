"""The router behind the front door, with the address twice, as docs/cluster.md says."""

import json

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.cluster.router import INFER, fake_servers, routing, tenant
from tests.deploy.door import haproxy, require_haproxy
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

NAMES = [f"tenant-{number}" for number in range(6)]
LIMITED = [f"limited-{number}" for number in range(6)]
TEXT = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}


def over_http(door, name):
    answer = door.post(INFER, json.dumps({"inputs": [TEXT], "parameters": {"tenant": name}}).encode())
    assert answer.status == 200, answer
    return json.loads(answer.body)["replica"]


def over_grpc(door, name):
    message = service_pb2.ModelInferRequest(
        model_name="toy", parameters={"tenant": service_pb2.InferParameter(string_param=name)}
    )
    credentials = grpc.ssl_channel_credentials(door.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{door.port}", credentials) as channel:
        return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=60).model_name


def test_requests_through_the_door_come_to_their_tenants_replica(tmp_path):
    require_haproxy()
    tenants = [*map(tenant, NAMES), *(tenant(name, rate=5.0) for name in LIMITED)]
    with fake_servers(3) as replicas, routing(tmp_path, replicas, tenants) as router:
        url = f"127.0.0.1:{router.port}"
        with haproxy(tmp_path / "door", url, url, "toy") as door:
            eventually(lambda: door.post(INFER, b"{}").status == 200)
            for name in (*NAMES, *LIMITED):
                home = router.replica_of(name)
                for ask in (over_http, over_grpc):
                    router.until_idle()
                    assert ask(door, name) == home
