"""The gateway, and our client, choose among the decoders of a fake Triton."""

import asyncio
import json
from contextlib import nullcontext
from functools import partial

import pytest
from triton_fakes import PART, FakeTriton, Refusal

from hplm_client.errors import Draining, HplmClientError, NoBackbone, NoTenant, ServerFault, UnexpectedAnswer
from hplm_openai.backbones import SECONDS_KNOWN, Backbones
from hplm_openai.completion_request import CompletionRequest
from tests.support.wait import Clock, Hold
from tests.support.ways import generate

GONE = Refusal("Request for unknown model: it was unloaded", 404)


class Several(FakeTriton):
    """`tenants`: those of each decoder; a decoder may be a refusal instead. `gone`: models that are unloaded meanwhile.

    `lists`: what the next lists of models fail with.
    """

    def __init__(self, tenants, gone=(), lists=()):
        super().__init__()
        self.tenants, self.gone, self.lists = tenants, gone, list(lists)
        self.models = {*tenants, *gone, "plain-model"}
        self.listed, self.hold, self.listings = 0, Hold(), []
        self.hold.open()

    def ModelStatistics(self, request, context):
        self.listed += 1
        self.hold.pass_through()
        if self.lists:
            self.lists.pop().end(context)
        return super().ModelStatistics(request, context)

    def inputs_of(self, model):
        if model in self.gone:
            raise GONE
        return [{"name": "text_input" if model in self.tenants else "INPUT"}]

    def take(self, request):
        """An encoder lists no tenant."""
        raise GONE if request.model in self.gone else Refusal("[no_tenant]")

    def decode(self, request):
        found, tenant = self.tenants[request.model], request.parameters.get("tenant")
        is_listing = "hplm_tenants" in request.parameters
        (self.listings if is_listing else self.requests).append(request)
        if isinstance(found, Refusal):
            raise found
        if tenant is not None and tenant not in found:
            raise Refusal("[no_tenant]")
        if is_listing:
            listed = found if tenant is None else [tenant]
            yield {"text_output": json.dumps([{"tenant": one, "task": "generate"} for one in listed])}
        elif request.parameters["tenant"] != "silent":
            yield from ({"text_output": request.model}, {"text_output": "end"})


def use(act, named=(), clock=None, **given):
    """Returns what `act(decoders, triton)` gives, and the fake Triton. No time passes but by the clock."""

    async def in_loop():
        decoders = Backbones(triton.grpc_url, named, 30.0, (clock or Clock()).monotonic)
        try:
            return await act(decoders, triton)
        finally:
            await decoders.close()

    with Several(**given) as triton:
        return asyncio.run(in_loop()), triton


async def ask(decoders, tenant="a"):
    return [response["text_output"][0] async for response in decoders.ask(CompletionRequest("a", tenant=tenant))]


async def outcome(decoders, tenant):
    """Returns what is answered, or the class of the error."""
    try:
        return await ask(decoders, tenant)
    except HplmClientError as error:
        return type(error)


@pytest.mark.parametrize(
    ("tenant", "tenants", "more", "expected", "asked"),
    [
        ("b", {"y": ["a"], "z": ["b"], "x": ["c"]}, {}, ["z", "end"], "z"),
        ("a", {"y": ["a"], "z": ["a"]}, {}, ["y", "end"], "y"),
        ("a", {"y": ["a"], "z": ["a"]}, {"named": ["z", "y"]}, ["z", "end"], "z"),
        ("a", {"y": GONE, "z": ["a"]}, {}, ["z", "end"], "z"),
        ("a", {"y": ["a"], "z": ["a"]}, {"gone": ["plain-model", "y"]}, ["z", "end"], "z"),
        ("a", {"y": Refusal("[draining]"), "z": ["a"]}, {}, Draining, ""),
        ("a", {"y": ["b"]}, {}, NoTenant, "y"),
        ("a", {"y": ["b"], "z": ["b"]}, {}, NoTenant, "y"),
        ("a", {"y": GONE, "z": ["b"]}, {}, NoTenant, "z"),
        ("a", {"y": ["b"], "z": GONE}, {}, NoTenant, "y"),
        ("a", {}, {}, NoBackbone, ""),
        ("a", {}, {"gone": ["toy", "toy-lookup", "toy-upper"]}, NoTenant, ""),
        ("silent", {"y": ["silent"]}, {}, UnexpectedAnswer, "y"),
    ],
)
def test_the_first_decoder_that_has_the_tenant_answers(tenant, tenants, more, expected, asked):
    found, triton = use(lambda decoders, _: outcome(decoders, tenant), tenants=tenants, **more)
    assert found == expected and "".join(request.model for request in triton.requests) == asked


def test_a_request_that_a_decoder_refuses_is_sent_once_and_the_decoder_of_a_tenant_is_remembered():
    """Each refusal counts as a request for an unknown tenant, which alerts watch."""

    async def act(decoders, triton):
        for _ in range(3):
            assert await ask(decoders, "b") == ["z", "end"]
        asked = len(triton.requests), len(triton.listings)
        triton.tenants = {"y": ["b"], "z": ["c"]}  # it has moved
        assert await ask(decoders, "b") == ["y", "end"]
        moved = [request.model for request in triton.requests[asked[0] :]]
        triton.tenants = {"y": [], "z": []}
        assert await outcome(decoders, "b") is NoTenant
        return asked, moved

    found, triton = use(act, tenants={"y": ["a"], "z": ["b"]})
    assert found == ((3, 2), ["z", "y"]) and len(triton.requests) == 3 + 2 + 2


def test_the_models_are_those_of_all_decoders_each_with_the_one_that_answers():
    tenants = {"y": ["a", "b"], "z": ["b", "c"], "x": GONE}
    found = use(lambda decoders, _: decoders.opened("key"), tenants=tenants)[0]
    assert [(tenant.name, tenant.backbone) for tenant in found] == [("a", "y"), ("b", "y"), ("c", "z")]
    for name, backbone in (("a", "y"), ("c", "z"), ("d", None)):
        with nullcontext() if backbone else pytest.raises(NoTenant):
            assert use(lambda decoders, _: decoders.find(name, None), tenants=tenants)[0].backbone == backbone  # noqa: B023


ANSWER, ONE = ["y", "end"], {"y": ["a"]}


def test_the_list_of_decoders_is_renewed_after_a_while_by_one_request_at_a_time():
    clock = Clock()

    async def act(decoders, triton):
        for passed, listed in ((0, 1), (0, 1), (SECONDS_KNOWN / 2, 1), (SECONDS_KNOWN, 2)):
            clock.sleep(passed)
            assert await asyncio.gather(*(ask(decoders) for _ in range(5))) == [ANSWER] * 5
            assert triton.listed == listed

    use(act, clock=clock, tenants=ONE)


def test_a_client_that_goes_while_it_renews_the_list_takes_it_from_no_other():
    async def act(decoders, _):
        first, second = (asyncio.create_task(ask(decoders)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    answer, triton = use(act, tenants=ONE)
    assert answer == ANSWER and triton.listed == 1


def test_a_list_that_fails_fails_those_that_wait_for_it_and_is_asked_for_again():
    async def act(decoders, _):
        failed = await asyncio.gather(*(ask(decoders) for _ in range(3)), return_exceptions=True)
        return [type(error) for error in failed], await ask(decoders)

    found, triton = use(act, tenants=ONE, lists=[Refusal("no", 500)])
    assert found == ([ServerFault] * 3, ANSWER) and triton.listed == 2


def test_requests_use_the_old_list_while_another_renews_it_or_has_failed_to():
    clock = Clock()

    async def act(decoders, triton):
        await ask(decoders)
        clock.sleep(SECONDS_KNOWN)
        triton.lists = [Refusal("no", 500)]
        with Hold() as triton.hold:
            renewing = asyncio.create_task(ask(decoders))
            await asyncio.to_thread(triton.hold.until_reached)
            old = await ask(decoders)
        with pytest.raises(ServerFault):
            await renewing
        return old, await ask(decoders)

    assert use(act, clock=clock, tenants=ONE)[0] == (ANSWER, ANSWER)


class Whole(Several):
    """Answers in one part that has all outputs."""

    def decode(self, request):
        first, *_ = super().decode(request)
        yield {**PART, **first}


@pytest.mark.parametrize(
    ("tenants", "given", "asked"),
    [
        ({"x": ["a"], "y": ["b"], "z": ["b"]}, {}, "y"),
        ({"x": ["a"], "y": ["b"], "z": ["b"]}, {"backbone": "hplm"}, "y"),
        ({"x": ["a"], "y": ["b"], "z": ["b"]}, {"backbone": "z"}, "z"),
        ({"x": GONE, "y": ["b"]}, {}, "y"),
        ({"x": ["a"]}, {}, NoTenant),
        ({"x": ["a"], "y": ["c"]}, {}, NoTenant),
        ({"x": Refusal("[draining]"), "y": ["b"]}, {}, Draining),
        ({}, {}, NoBackbone),
    ],
)
def test_our_client_asks_the_first_decoder_that_lists_the_tenant(way, tenants, given, asked):
    """A listing is not counted, while a request that is refused counts as one for an unknown tenant."""
    with Whole(tenants) as triton:
        call = partial(way.call, way.url(triton), partial(generate, tenant="b"), retries=0, **given)
        if isinstance(asked, str):
            assert call().text == asked
        else:
            with pytest.raises(asked):
                call()
        refused = asked is NoTenant
        assert [one.model for one in triton.requests] == ([asked] if isinstance(asked, str) else [*tenants][-1:] * refused)
