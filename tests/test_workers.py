"""Processes that answer questions: order, errors, deaths."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator

import pytest

from autoshard.errors import AutoshardError, InfeasibleError, UnknownNameError
from autoshard.workers import Ask, Workers, told


class Held:
    """What the workers of these tests hold."""

    def __init__(self, base: int) -> None:
        self.base, self.made = base, set[object]()

    def plus(self, number: int) -> int:
        return self.base + number

    def fail(self, name: str) -> None:
        raise UnknownNameError("fruit", name, ("apple", "pear"))

    def divide(self, number: int) -> float:
        return 1 / number

    def make(self, name: str) -> tuple[int, bool]:
        """Who made it, and whether it was there."""
        was = name in self.made
        self.made.add(name)
        return os.getpid(), was

    def end(self, status: int) -> None:
        os._exit(status)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2, __name__) as found:
        found.hold(Held, 10)
        yield found


def test_answers_come_in_the_order_of_the_questions(workers: Workers) -> None:
    asked = [Ask("plus", n) for n in range(20)]
    assert workers.answers(asked) == list(range(10, 30))
    assert workers.answers([]) == []


def test_what_is_made_once_is_asked_where_it_is(workers: Workers) -> None:
    names = ["a", "b", "c", "a", "b", "c", "a"]
    first = workers.answers([Ask("make", n, n) for n in names])
    again = workers.answers([Ask("make", n, n) for n in names])
    homes = dict(zip(names, (pid for pid, _ in first), strict=True))
    assert [pid for pid, _ in first + again] == [homes[n] for n in names * 2]
    assert all(was for _, was in again)


def test_errors_are_raised_where_the_question_was_asked(workers: Workers) -> None:
    with pytest.raises(UnknownNameError, match="unknown fruit 'aple'; nearest: apple") as caught:
        workers.answers([Ask("fail", "aple")])
    assert caught.value.known == ["apple", "pear"]
    with pytest.raises(ZeroDivisionError) as other:
        workers.answers([Ask("divide", 0)])
    assert "in divide" in "".join(other.value.__notes__)
    assert workers.answers([Ask("plus", 1)]) == [11]


def test_what_is_begun_beside_is_found_by_whoever_asks_later(workers: Workers) -> None:
    ((mine, was),) = workers.answers([Ask("make", "a", "a")], [Ask("make", "b", "b")])
    assert not was
    # The other worker made it once; asked again it was there.
    ((other, was),) = workers.answers([Ask("make", "b", "b")])
    assert other != mine
    assert not was
    assert workers.answers([Ask("make", "b", "b")]) == [(other, True)]


def test_what_is_next_is_begun_where_nothing_is_asked(workers: Workers) -> None:
    assert workers.answers([], [Ask("make", "a", "a"), Ask("make", "b", "b")]) == []
    made = workers.answers([Ask("make", "b", "b"), Ask("make", "a", "a")])
    assert len({pid for pid, _ in made}) == 2
    assert [was for _, was in made] == [False, False]


@pytest.mark.parametrize("is_long", [False, True])
def test_only_for_what_is_long_is_anything_made_twice(workers: Workers, is_long: bool) -> None:
    ((mine, _),) = workers.answers([Ask("make", "a", "a")])
    asked = Ask("make", "more of a", "a", is_long)
    workers.answers([Ask("make", "a", "a")], [asked, Ask("make", "b", "b")])
    ((found, _),) = workers.answers([asked])
    assert (found != mine) == is_long


def test_errors_of_what_nobody_asked_for_are_not_raised(workers: Workers) -> None:
    for _ in range(2):
        beside = [Ask("divide", 0), Ask("fail", "aple")]
        assert workers.answers([Ask("plus", 1)] * 3, beside) == [11] * 3
        assert workers.answers([Ask("plus", n) for n in range(4)]) == [10, 11, 12, 13]
    with pytest.raises(ZeroDivisionError):
        workers.answers([Ask("divide", 0)])


def test_what_was_begun_is_forgotten_with_what_was_held(workers: Workers) -> None:
    workers.answers([Ask("make", "a", "a")], [Ask("plus", 1)])
    workers.hold(Held, 20)
    assert workers.answers([Ask("plus", 1)]) == [21]


def test_a_worker_that_ends_is_an_error(workers: Workers) -> None:
    with pytest.raises(AutoshardError, match=r"ended with status 3.*workers=1"):
        workers.answers([Ask("end", 3)])


def test_a_worker_that_is_killed_is_an_error(workers: Workers) -> None:
    (pid, _), *_ = workers.answers([Ask("make", "a", "a")])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(AutoshardError, match="ended with status -9"):
        workers.answers([Ask("make", "a", "a"), Ask("plus", 1)])


def test_workers_end_with_the_one_that_asks() -> None:
    with Workers(2, __name__) as found:
        found.hold(Held, 0)
        pids = {pid for pid, _ in found.answers([Ask("make", n, n) for n in "ab"])}
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    class Local(Exception):
        pass

    def fails(_: object) -> None:
        raise Local("here")

    answer, error = pickle.loads(told(fails, None))
    assert answer is None
    assert isinstance(error, AutoshardError)
    assert "Local: here" in str(error)


def test_errors_are_the_same_after_pickling() -> None:
    error = InfeasibleError("nothing fits", binding="parameters", nearest=["16 devices"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.binding, again.nearest) == (str(error), "parameters", ("16 devices",))
