"""Waits with a bound."""

import asyncio

import pytest

from hplm_client.waiting import within

PATIENCE = 60


async def _ready():
    return "ready"


def test_a_result_comes_and_an_error_is_raised():
    async def fails():
        raise KeyError("broken")

    assert asyncio.run(within(_ready(), PATIENCE)) == "ready"
    with pytest.raises(KeyError):
        asyncio.run(within(fails(), PATIENCE))


def test_work_that_takes_too_long_is_cancelled():
    async def run():
        work = asyncio.create_task(asyncio.sleep(PATIENCE))
        with pytest.raises(asyncio.TimeoutError):
            await within(work, 0)
        await asyncio.wait({work})
        assert work.cancelled()

    asyncio.run(run())


def test_a_cancelling_that_comes_with_the_result_is_not_lost():
    """A stream whose next part has just come must end too when its reader is cancelled."""

    async def run():
        part = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(within(part, PATIENCE))
        await asyncio.sleep(0)  # it waits
        part.set_result("a part")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())
