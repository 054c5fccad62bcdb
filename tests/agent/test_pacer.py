"""The bandwidth cap, and its end."""

from __future__ import annotations

import asyncio

from surefoot.agent.save.pacer import Pacer


def test_nothing_is_held_back_once_the_cap_is_lifted() -> None:
    """Bytes that wait for their turn under a cap of one an hour pass at once when it is lifted."""

    async def story() -> None:
        pacer = Pacer(1 / 3600)
        async with asyncio.timeout(60.0):
            await pacer.take(1)
            waiting = [asyncio.create_task(pacer.take(1)) for _ in range(3)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            pacer.release()
            await asyncio.gather(*waiting)
            assert pacer.held_s > 0.0
            held_s = pacer.held_s
            await pacer.take(10**12)
            assert pacer.held_s == held_s

    asyncio.run(story())
