"""Requests to a service at once, from code that is not asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_async(function: Callable[[], Awaitable[Result]]) -> Result:
    """Run an asynchronous function to its end and return its result.

    It runs in the event loop of a new thread, so a notebook, which has a loop, can call this too.
    Interrupting the caller, as by Ctrl-C, cancels it.
    """
    with start_blocking_portal() as portal:
        return portal.call(function)


async def request_all(
    request: Callable[[Item], Coroutine[Any, Any, Result]],
    items: Sequence[Item],
    *,
    concurrency: int,
) -> list[Result]:
    """Return the result of `request` for each item, in their order.

    Args:
        request: called once per item.
        items: arguments of the requests.
        concurrency: largest number of requests at once.

    Raises:
        Exception: the first that a request raised; the other requests are cancelled.
    """
    free = asyncio.Semaphore(concurrency)

    async def one(item: Item) -> Result:
        async with free:
            return await request(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__  # one failure says more than a group with one
    return [task.result() for task in tasks]
