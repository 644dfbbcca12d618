"""Waits that an interrupt ends, in whatever thread, and that users are told of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ktconv.system import waiting
from ktconv.system.waiting import Wait


def interrupted_after(wait: Callable[[], object], threads: int = 1) -> float:
    """Seconds that waits in threads still take after an interrupt."""
    with waiting.interrupts_end_waits() as end, ThreadPoolExecutor(threads) as pool:
        found = [pool.submit(wait) for _ in range(threads)]
        time.sleep(0.1)
        assert not any(one.done() for one in found)
        started = time.monotonic()
        end()
        for one in found:
            with pytest.raises(KeyboardInterrupt):
                one.result()
        return time.monotonic() - started


@pytest.mark.parametrize("threads", [1, 8])
def test_an_interrupt_ends_pauses(threads: int) -> None:
    assert interrupted_after(lambda: waiting.sleep(60), threads) < 5


def test_an_interrupt_ends_the_wait_for_an_answer() -> None:
    never = threading.Event()
    assert interrupted_after(lambda: waiting.answer(never.wait, "a server")) < 5
    never.set()


def test_no_wait_begins_after_an_interrupt_until_its_work_has_ended() -> None:
    called: list[int] = []
    with waiting.interrupts_end_waits() as end, ThreadPoolExecutor(1) as pool:
        end()
        with pytest.raises(KeyboardInterrupt):
            pool.submit(waiting.answer, lambda: called.append(1), "a server").result()
        with pytest.raises(KeyboardInterrupt):
            waiting.sleep(0)
    assert called == []
    waiting.sleep(0)
    assert waiting.answer(lambda: 3, "a server") == 3


def test_answers_and_errors_come_through() -> None:
    def fails() -> None:
        raise TimeoutError("of the call")

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(waiting.answer, lambda: 3, "a server").result() == 3
        with pytest.raises(TimeoutError, match="of the call"):
            pool.submit(waiting.answer, fails, "a server").result()


def test_listeners_may_end_in_another_order_than_they_began() -> None:
    heard: list[tuple[str, Wait]] = []
    first = waiting.told_to(lambda found: heard.append(("first", found)))
    second = waiting.told_to(lambda found: heard.append(("second", found)))
    wait = Wait("a server", "answer", 1.0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    waiting.tell(wait)
    second.__exit__(None, None, None)
    waiting.tell(wait)
    assert heard == [("second", wait)]


def test_the_same_wait_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told: list[Wait] = []
    waiting.tell(Wait("a", "nobody listens"))
    with waiting.told_to(told.append):
        waiting.tell(Wait("a", "busy", 30))
        waiting.tell(Wait("b", "busy", 30))
        now[0] += 29
        waiting.tell(Wait("a", "busy", 30))
        now[0] += 2
        waiting.tell(Wait("a", "busy again", 8))
    assert [(one.subject, one.why) for one in told] == [
        ("a", "busy"), ("b", "busy"), ("a", "busy again"),
    ]  # fmt: skip
    assert told[0].words == "Waiting 30 s for a: busy."
    assert Wait("a", "busy").words == "Waiting for a: busy."


def test_an_answer_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SLOW_SECONDS", 0.15)
    told: list[Wait] = []
    with waiting.told_to(told.append), ThreadPoolExecutor(1) as pool:
        pool.submit(waiting.answer, lambda: time.sleep(0.5), "a server").result()
    [one] = told
    assert one.subject == "a server" and "has not answered" in one.why
