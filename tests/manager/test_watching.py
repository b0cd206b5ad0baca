"""What an operator reads of replicas, from what they publish."""

from hplm.metrics import names
from manager.watching import Watching
from tests.support.fakes import SmallServer, answer
from tests.support.wait import Clock


def published(requests, age):
    lines = [
        f'{names.LOOKUPS.name}{{backbone="toy",outcome="passed_on"}} {requests}',
        f'{names.LOOKUPS.name}{{backbone="toy",outcome="quota"}} 3',
        f'{names.REQUESTS.name}{{backbone="toy",domain="law",outcome="on_time"}} {requests - 2}.000000',
        f'{names.REQUESTS.name}{{backbone="toy",domain="law",outcome="late"}} 2',
        f'{names.REGISTRY_AGE_SECONDS.name}{{backbone="toy",model="toy-lookup"}} {age}',
        f'{names.REGISTRY_AGE_SECONDS.name}{{backbone="toy",model="toy-upper"}} 0.25',
        f'{names.QUARANTINED_TENANTS.name}{{backbone="toy"}} 1',
    ]
    return "\n".join(["# HELP hplm_x A metric", *lines, 'nv_gpu_utilization{gpu="0"} 0.5', ""]).encode()


def test_replicas_tell_rates_refusals_and_ages_and_one_that_is_gone_does_not_answer():
    said, clock = [published(10, 0.5), published(30, 1.5), published(5, 0.0)], Clock()
    with SmallServer(lambda *_: answer(body=said[0])) as server:
        watching = Watching([server.url, "127.0.0.1:1"], clock)
        first, gone = watching.replicas()
        assert (first["server"], first["answers"], first["rate"], first["late"]) == (server.url, True, None, 2)
        assert (dict(first["refused"]), first["age"], first["quarantined"]) == ({"quota": 3}, 0.5, 1)
        assert (gone["answers"], gone["rate"], gone["age"]) == (False, None, None)
        clock.seconds += 4
        said.pop(0)
        assert watching.replicas()[0]["rate"] == 5
        clock.seconds += 4
        said.pop(0)
        assert watching.replicas()[0]["rate"] is None, "it has started again"
    assert not watching.replicas()[0]["answers"]
