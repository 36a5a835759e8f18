from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from threading import Lock

import pytest

from branchwise.interpreter.changes import Awaiting, Changes, Wait, blocking
from branchwise.interpreter.outcome import Outcome, cancelled, in_order_of_settling

Eventually = Callable[[Callable[[], bool]], None]


class Box:
    """Something that changes."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.changes = Changes(self.lock)

    def change(self) -> None:
        with self.lock:
            self.changes.happen()

    def next(self) -> Wait:
        with self.lock:
            return self.changes.next()


@pytest.mark.timeout(10)
def test_what_has_changed_before_the_wait_begins_is_not_waited_for() -> None:
    box = Box()
    wait = box.next()
    box.change()
    wait.block()

    async def main() -> None:
        await asyncio.wait_for(wait._awaited(), 5)

    asyncio.run(main())


@pytest.mark.timeout(10)
def test_a_change_wakes_every_thread_and_every_event_loop(eventually: Eventually) -> None:
    box, woken = Box(), []

    def on_thread(wait: Wait) -> None:
        wait.block()
        woken.append("thread")

    def on_loop(wait: Wait) -> None:
        async def main() -> None:
            await wait
            woken.append("loop")

        asyncio.run(main())

    wait = box.next()
    threads = [threading.Thread(target=target, args=(wait,)) for target in (on_thread, on_loop) * 3]
    for thread in threads:
        thread.start()
    eventually(lambda: len(box.changes._watchers) == 6)
    assert woken == []
    box.change()
    for thread in threads:
        thread.join()
    assert sorted(woken) == ["loop"] * 3 + ["thread"] * 3
    assert not box.changes._watchers


@pytest.mark.timeout(10)
def test_a_wait_that_was_given_up_and_a_loop_that_is_closed_hinder_nobody() -> None:
    box = Box()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(box.next()._awaited(), 0.01)

    asyncio.run(give_up())
    assert not box.changes._watchers

    loop = asyncio.new_event_loop()
    waiting = box.next()._awaited()
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert len(box.changes._watchers) == 1
    box.change()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # left on purpose
    waiting.close()
    assert not box.changes._watchers


@pytest.mark.timeout(10)
def test_steps_are_the_same_to_a_thread_and_to_an_event_loop() -> None:
    def steps(box: Box) -> Iterator[int | Wait]:
        for number in range(3):
            wait = box.next()
            threading.Timer(0.005, box.change).start()
            yield wait
            yield number

    async def main() -> list[int]:
        return [step async for step in Awaiting(steps(Box()))]

    assert list(blocking(steps(Box()))) == asyncio.run(main()) == [0, 1, 2]


@pytest.mark.timeout(10)
def test_outcomes_are_told_in_the_order_in_which_they_are_settled() -> None:
    outcomes = [Outcome() for _ in range(4)]
    outcomes[2].succeed("done before", "")
    told = blocking(in_order_of_settling(outcomes))
    assert next(told) == 2
    for index, number in enumerate((3, 0, 1)):
        settle = outcomes[number].succeed if index else outcomes[number].fail
        args = ("x", "x") if index else (cancelled("why"),)
        threading.Timer(0.005, settle, args).start()
        assert next(told) == number
    assert list(told) == []
