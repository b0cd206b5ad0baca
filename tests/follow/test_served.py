"""A real Triton that serves a copy, while its tenants are managed at the source: a real nginx before a real state."""

import threading

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from hplm.follow.follower import Follower
from hplm.follow.source import Source
from hplm.tenants.manager import Manager
from tests.follow.machine import Machine, same
from tests.follow.nginx import TOKEN, nginx
from tests.follow.test_following import add_law
from tests.places import TEXT, answer, knowledge, make_place
from tests.server.asking import Asking
from tests.server.stock import Stock
from tests.support.servers import serving
from tests.support.wait import eventually

pytestmark = pytest.mark.slow
NEAR = 0.05  # the server may compute in bf16; answers of other weights differ by more


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def source(place, tmp_path_factory):
    """The address of a real nginx."""
    place[2].mkdir()
    with nginx(place[2], tmp_path_factory.mktemp("nginx")) as url:
        yield url


@pytest.fixture(scope="module")
def machine(place, source, tmp_path_factory):
    """A copy that a thread keeps, and a server that reads it."""
    machine = Machine(place[1], tmp_path_factory.mktemp("machine") / "copy", source)
    stop = threading.Event()
    follower = Follower(place[1], machine.root, lambda: Source(source, TOKEN), "one", machine.said.append)
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    with serving(place[1], state=machine.root) as server:
        machine.server = server
        yield machine
    stop.set()
    thread.join()
    follower.close()


def refusal(stock, tenant, **options):
    with pytest.raises(InferenceServerException) as caught:
        stock.ask([TEXT], tenant, **options)
    return caught.value.message()


def test_a_server_of_a_copy_serves_what_the_source_has(place, source, machine):
    store, repository, state = place
    live, stock = Manager.open(repository, state), Stock(machine.server, "http")
    eventually(lambda: len(live.state.taken(0.0)) == 1)
    change = live.add("new-a", knowledge(store, "new-a"))
    assert live.settle(change.generation) == []
    found = stock.ask([TEXT], "new-a", outputs=("LOGITS",))["LOGITS"]
    assert np.allclose(found, answer(place, "new-a").numpy(), atol=NEAR)
    add_law(place, live)
    assert live.settle_now() == []
    found = stock.ask([TEXT], "lawyer", outputs=("LOGITS",))["LOGITS"]
    assert np.allclose(found, answer(place, "lawyer").numpy(), atol=NEAR)
    assert same((repository, state), machine)
    first, second = live.add_key("new-a"), live.add_key("new-a")
    assert live.settle_now() == []
    for secret, _ in (first, second):
        assert stock.ask([TEXT], "new-a", headers={"authorization": f"Bearer {secret}"})
    live.revoke_key("new-a", first[1].id)
    assert live.settle_now(removes=True) == []
    assert "[no_tenant]" in refusal(stock, "new-a", headers={"authorization": f"Bearer {first[0]}"})
    assert stock.ask([TEXT], "new-a", headers={"authorization": f"Bearer {second[0]}"})


def test_no_answer_comes_after_delete_has_returned(place, source, machine):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-b", knowledge(store, "new-b"))
    assert live.settle_now() == []
    with Asking(lambda protocol: Stock(machine.server, protocol), ["new-b", "tenant-0"], [TEXT]) as asking:
        asking.wait_for(lambda tenant, _, found: tenant == "new-b" and not isinstance(found, Exception), 3)
        live.delete("new-b")
        assert live.settle_now(removes=True) == []
        refusal(Stock(machine.server, "http"), "new-b")
        before = len(asking.answers) + 4  # each client may have had an answer on its way
        asking.wait_for(lambda tenant, *_: tenant == "new-b", 12)
        later = [found for tenant, _, found in asking.answers[before:] if tenant == "new-b"]
        others = [found for tenant, _, found in asking.answers if tenant == "tenant-0"]
    assert later and all(isinstance(found, Exception) for found in later)
    assert others and not any(isinstance(found, Exception) for found in others)
