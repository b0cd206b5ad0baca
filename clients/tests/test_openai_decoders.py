"""The gateway chooses among several decoders. The connection to Triton is played here."""

import asyncio
from unittest import mock

import pytest

from hplm_client.errors import ConnectionFailed, Draining, NoBackbone, NoTenant, UnexpectedAnswer
from hplm_openai.decoders import SECONDS_KNOWN, Decoders
from hplm_openai.requests import Asked, Opened
from tests.support.wait import Clock


class Transport:
    """`tenants`: those of each decoder; a decoder may be an error instead. `gone`: models that are unloaded meanwhile.

    `failures`: what the next lists of models fail with.
    """

    def __init__(self, gone=(), failures=(), **tenants):
        self.tenants = tenants
        self.gone = gone
        self.failures = list(failures)
        self.asked = []
        self.listed = 0

    async def statistics(self, seconds):
        self.listed += 1
        await asyncio.sleep(0)  # others come meanwhile
        if self.failures:
            raise self.failures.pop()
        return {"model_stats": [{"name": name} for name in (*self.tenants, "plain-model")]}

    async def metadata(self, model, seconds):
        if model in self.gone:
            raise NoBackbone("unknown model")
        return {"inputs": [{"name": "text_input" if model in self.tenants else "INPUT"}]}

    async def generate(self, name, asked, timeout_us, seconds):
        self.asked.append(name)
        found = self.tenants[name]
        if isinstance(found, Exception):
            raise found
        if isinstance(asked, Opened):
            yield {"text_output": [str(found).replace("'", '"')]}
        elif asked.tenant not in found:
            raise NoTenant("[no_tenant]")
        elif asked.tenant != "silent":
            yield {"text_output": [name]}
            yield {"text_output": ["end"]}

    async def close(self):
        pass


def use(act, named=(), **tenants):
    """Returns what `act(decoders, transport)` gives, and the transport."""

    async def in_loop():
        with mock.patch("hplm_openai.decoders.AsyncGrpcTransport", lambda settings: transport):
            return await act(Decoders("127.0.0.1:1", named, 1.0), transport)

    transport = Transport(**tenants)
    return asyncio.run(in_loop()), transport


async def ask(decoders, tenant="a"):
    return [response["text_output"][0] async for response in decoders.ask(Asked(tenant, "a"))]


def asking(tenant):
    return lambda decoders, _: ask(decoders, tenant)


GONE = NoBackbone("unknown model")


@pytest.mark.parametrize(
    ("tenant", "given", "answers", "asked"),
    [
        ("b", {"y": ["a"], "z": ["b"], "x": ["c"]}, "z", ["x", "y", "z"]),
        ("a", {"y": ["a"], "z": ["a"]}, "y", ["y"]),
        ("a", {"named": ["z", "y"], "y": ["a"], "z": ["a"]}, "z", ["z"]),
        ("a", {"y": GONE, "z": ["a"]}, "z", ["y", "z"]),
        ("a", {"gone": ["plain-model", "y"], "y": ["a"], "z": ["a"]}, "z", ["z"]),
    ],
)
def test_the_first_decoder_that_has_the_tenant_answers(tenant, given, answers, asked):
    answer, transport = use(asking(tenant), **given)
    assert answer == [answers, "end"] and transport.asked == asked


@pytest.mark.parametrize(
    ("tenant", "given", "kind"),
    [
        ("a", {"y": Draining("[draining]"), "z": ["a"]}, Draining),
        ("a", {"y": ["b"]}, NoTenant),
        ("a", {"y": GONE, "z": ["b"]}, NoTenant),
        ("a", {"y": ["b"], "z": GONE}, NoTenant),
        ("a", {}, NoBackbone),
        ("silent", {"y": ["silent"]}, UnexpectedAnswer),
    ],
)
def test_what_no_decoder_answers_is_an_error(tenant, given, kind):
    with pytest.raises(kind):
        use(asking(tenant), **given)


def test_the_models_are_those_of_all_decoders_each_with_the_one_that_answers():
    opened, _ = use(lambda decoders, _: decoders.opened("key"), y=["a", "b"], z=["b", "c"], x=GONE)
    assert opened == {"a": "y", "b": "y", "c": "z"}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hplm_openai.decoders.time", clock)
    return clock


ANSWER = ["y", "end"]


def test_the_list_of_decoders_is_renewed_after_a_while_by_one_request_at_a_time(clock):
    async def act(decoders, transport):
        for passed, listed in ((0, 1), (0, 1), (SECONDS_KNOWN / 2, 1), (SECONDS_KNOWN, 2)):
            clock.sleep(passed)
            assert await asyncio.gather(*(ask(decoders) for _ in range(5))) == [ANSWER] * 5
            assert transport.listed == listed

    use(act, y=["a"])


def test_a_client_that_goes_while_it_renews_the_list_takes_it_from_no_other():
    async def act(decoders, _):
        first, second = (asyncio.create_task(ask(decoders)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    answer, transport = use(act, y=["a"])
    assert answer == ANSWER and transport.listed == 1


def test_a_list_that_fails_fails_those_that_wait_for_it_and_is_asked_for_again():
    async def act(decoders, _):
        failed = await asyncio.gather(*(ask(decoders) for _ in range(3)), return_exceptions=True)
        return [type(error) for error in failed], await ask(decoders)

    found, transport = use(act, failures=[ConnectionFailed("nobody listens")], y=["a"])
    assert found == ([ConnectionFailed] * 3, ANSWER) and transport.listed == 2


def test_requests_use_the_old_list_while_another_renews_it_or_has_failed_to(clock):
    async def act(decoders, transport):
        await ask(decoders)
        clock.sleep(SECONDS_KNOWN)
        renewing = asyncio.create_task(ask(decoders))
        await asyncio.sleep(0)
        transport.failures = [ConnectionFailed("nobody listens")]
        old = await ask(decoders)
        with pytest.raises(ConnectionFailed):
            await renewing
        return old, await ask(decoders)

    assert use(act, y=["a"])[0] == (ANSWER, ANSWER)
