"""The pool: results, arguments, errors, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from autoshard.errors import MeshError, RankError, RequestError
from autoshard.runtime.comm import dry_run
from autoshard.runtime.processes import Pool, Progress, World, current_world, get_pool
from autoshard.runtime.processes.payload import pack, unpack
from tests.processes import bodies

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60  # a limit, never reached unless something hangs


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, timeout_s=LONG_S) as pool:
        yield pool


def gone(pids: list[int]) -> bool:
    return all(
        not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        for pid in pids
    )


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


# ---- results and arguments ----


@pytest.mark.multirank
class TestCalls:
    def test_results_are_in_rank_order(self, pool: Pool) -> None:
        assert pool.run(bodies.ranks) == [(0, 3), (1, 3), (2, 3)]

    def test_ranks_stay_between_calls(self, pool: Pool) -> None:
        before, generation = pool.run(bodies.pids), pool.generation
        assert pool.run(bodies.pids) == before
        assert pool.generation == generation
        assert os.getpid() not in before

    def test_ranks_form_a_process_group(self, pool: Pool) -> None:
        for result in pool.run(bodies.total, torch.ones(2)):
            assert result.tolist() == [3.0, 3.0]

    def test_closures_and_lambdas_run(self, pool: Pool) -> None:
        offset = 10

        def body(world: World) -> int:
            return world.rank + offset

        assert pool.run(body) == [10, 11, 12]
        assert pool.run(lambda world: world.size) == [3, 3, 3]

    def test_a_rank_has_one_thread(self, pool: Pool) -> None:
        assert pool.run(bodies.threads) == [1, 1, 1]

    @pytest.mark.parametrize("count", [4, 100_000, 5_000_000], ids=["inline", "read", "mapped"])
    def test_ranks_do_not_see_what_others_write(self, pool: Pool, count: int) -> None:
        tensor = torch.zeros(count)
        assert pool.run(bodies.overwrite, tensor) == [0.0, 1.0, 2.0]
        assert tensor.sum() == 0

    def test_views_of_one_tensor_stay_views(self, pool: Pool) -> None:
        tensor = torch.zeros(10_000)
        for first, second in pool.run(bodies.views, (tensor, tensor[:5])):
            assert second[0] == 42
            first[1] = 7
            assert second[1] == 7
        assert tensor[0] == 0

    def test_tied_parameters_stay_tied(self, pool: Pool) -> None:
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        second.weight = first.weight
        for one, other in pool.run(bodies.return_tied, (first, second)):
            assert other.weight is one.weight
            assert torch.equal(one.weight, first.weight)

    def test_progress_reaches_the_caller(self, pool: Pool) -> None:
        heard: list[tuple[int, Progress]] = []
        pool.call(bodies.report, (2,), on_progress=lambda rank, p: heard.append((rank, p)))
        assert len(heard) == 6
        assert [p for rank, p in heard if rank == 1] == [
            Progress("step 0", 0.5),
            Progress("step 1", 1.0),
        ]

    def test_path_and_folder_are_the_callers(
        self, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("/nowhere/at/all")
        assert pool.run(bodies.folder) == [(str(tmp_path), True)] * 3

    def test_pools_of_several_sizes_live_together(self, pool: Pool) -> None:
        with Pool(1) as other:
            assert other.run(bodies.ranks) == [(0, 1)]
            assert len(pool.run(bodies.ranks)) == 3

    def test_calls_from_two_threads_take_turns(self, pool: Pool) -> None:
        results: list[list[tuple[int, int]]] = []
        threads = [
            threading.Thread(target=lambda: results.append(pool.run(bodies.ranks)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert results == [[(0, 3), (1, 3), (2, 3)]] * 3

    def test_a_pool_outlives_the_thread_that_made_it(self) -> None:
        made: list[Pool] = []
        thread = threading.Thread(target=lambda: made.append(Pool(2)))
        thread.start()
        thread.join()
        with made[0] as pool:
            assert pool.run(bodies.ranks) == [(0, 2), (1, 2)]

    def test_get_pool_keeps_one_a_size(self) -> None:
        assert get_pool(4) is get_pool(4)
        assert get_pool(2) is not get_pool(4)


# ---- failures ----

FAILURES: list[tuple[Callable[..., object], tuple[object, ...], int | None, str]] = [
    (bodies.raise_on, (1,), 1, "rank 1 of 3 raised ZeroDivisionError: the divisor is zero"),
    (bodies.kill_in_collective, (2,), 2, "rank 2 of 3 was killed by SIGKILL"),
    (bodies.exit_on, (1,), 1, r"rank 1 of 3 called sys.exit\(7\)"),
    (bodies.hard_exit, (), 1, "rank 1 of 3 left with exit status 5"),
    (bodies.abort, (), 1, r"rank 1 of 3 was killed by SIGABRT(.|\n)*bodies.py"),
    (bodies.raise_stubborn, (), None, "Stubborn: 1 and 2"),
    (bodies.return_lock, (), None, "the result, a lock, cannot be sent back: TypeError"),
    (bodies.start_a_pool, (), None, "is a rank already"),
]


@pytest.mark.multirank
class TestFailures:
    @pytest.mark.parametrize(
        ("body", "args", "rank", "message"), FAILURES, ids=[f[0].__name__ for f in FAILURES]
    )
    def test_failure_is_told_and_the_next_call_works(
        self,
        pool: Pool,
        body: Callable[..., object],
        args: tuple[object, ...],
        rank: int | None,
        message: str,
    ) -> None:
        before = pool.run(bodies.pids)
        with pytest.raises(RankError, match=message) as caught:
            pool.run(body, *args)
        assert rank is None or caught.value.rank == rank
        assert gone(before)
        assert pool.run(bodies.ranks) == [(0, 3), (1, 3), (2, 3)]

    def test_traceback_and_exception_are_the_ranks_own(self, pool: Pool) -> None:
        with pytest.raises(RankError) as caught:
            pool.run(bodies.raise_on, 2)
        assert 'raise ZeroDivisionError("the divisor is zero")' in str(caught.value)
        assert "runtime/processes" not in str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_hang_names_the_rank_and_where_it_is(self, pool: Pool) -> None:
        pool.run(bodies.ranks)
        with pytest.raises(RankError, match="did not answer within 1 s") as caught:
            pool.call(bodies.sleep_on, (1,), timeout_s=1)
        assert caught.value.rank == 1
        assert "all but rank 1 wait in a collective" in str(caught.value)
        assert "in fall_asleep" in str(caught.value)
        assert "in all_reduce" in str(caught.value)
        assert pool.run(bodies.ranks) == [(0, 3), (1, 3), (2, 3)]

    def test_collective_has_a_limit_of_its_own(self) -> None:
        with Pool(2, timeout_s=1) as pool:
            pool.run(bodies.ranks)
            with pytest.raises(RankError, match=r"(?i)timed out|timeout|did not answer"):
                pool.call(bodies.sleep_on, (1,), timeout_s=LONG_S)

    def test_mismatched_collectives_end(self, pool: Pool) -> None:
        with pytest.raises(RankError):
            pool.call(bodies.mismatch, timeout_s=5)
        assert pool.run(bodies.ranks) == [(0, 3), (1, 3), (2, 3)]

    def test_rank_that_dies_between_calls_is_replaced(self, pool: Pool) -> None:
        before = pool.run(bodies.pids)
        os.kill(before[1], signal.SIGKILL)
        assert eventually(lambda: gone(before[1:2]))
        assert not set(pool.run(bodies.pids)) & set(before)

    def test_dead_helper_is_replaced(self, pool: Pool) -> None:
        before = pool.run(bodies.pids)
        (parent,) = {psutil.Process(pid).ppid() for pid in before}
        os.kill(parent, signal.SIGKILL)
        assert eventually(lambda: gone([parent, *before]))
        assert pool.run(bodies.ranks) == [(0, 3), (1, 3), (2, 3)]

    def test_error_in_the_callers_callback_ends_the_call(self, pool: Pool) -> None:
        def refuse(rank: int, progress: Progress) -> None:
            raise LookupError("no")

        with pytest.raises(LookupError):
            pool.call(bodies.report, (3,), on_progress=refuse)
        assert pool.run(bodies.ranks) == [(0, 3), (1, 3), (2, 3)]

    def test_argument_that_cannot_be_sent_is_refused(self, pool: Pool) -> None:
        with pytest.raises(RequestError, match="total or one of its arguments cannot be sent"):
            pool.run(bodies.total, threading.Lock())  # type: ignore[arg-type]


def test_pool_without_ranks_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one rank"):
        Pool(0)


# ---- the end of the caller ----

SCRIPT = """
    import os, signal, sys, threading, time
    from autoshard.runtime.processes import get_pool

    def pids(world):
        return os.getpid()

    def forever(world):
        world.progress("busy")
        while True:
            time.sleep(0.01)

    pool = get_pool(2)
    ranks = pool.run(pids)
    print(*ranks, flush=True)
"""
ENDS = {
    "left": "raise SystemExit(1)",
    "killed_while_idle": "os.kill(os.getpid(), signal.SIGKILL)",
    "killed_while_busy": "pool.call(forever, on_progress=lambda *_: os.kill(os.getpid(), 9))",
}
INTERRUPT = """
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    try:
        pool.call(forever, on_progress=interrupt)
    except KeyboardInterrupt:
        again = pool.run(pids)
        print(*again, flush=True)
"""


def run_script(body: str) -> tuple[list[int], str]:
    """The pids of the ranks that a script printed, and its standard error."""
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG_S
    )
    return [int(word) for word in done.stdout.split()], done.stderr


def files() -> set[str]:
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.multirank
class TestEnd:
    @pytest.mark.parametrize("end", ENDS)
    def test_nothing_is_left(self, end: str) -> None:
        before = files()
        pids, stderr = run_script(ENDS[end])
        assert len(pids) == 2, stderr
        assert stderr == ""
        assert eventually(lambda: gone(pids))
        assert not {name for name in files() - before if "autoshard" in name or "torch" in name}

    def test_interrupt_ends_the_call_and_the_next_one_works(self) -> None:
        pids, stderr = run_script(INTERRUPT)
        assert len(pids) == 4, stderr
        assert len(set(pids)) == 4
        assert eventually(lambda: gone(pids))


# ---- worlds ----

UNDER_TORCHRUN = """
    import torch, torch.distributed as dist
    from autoshard.errors import MeshError, RequestError
    from autoshard.runtime.processes import Pool, current_world
    from tests.processes import bodies

    world = current_world()
    assert world is current_world()
    assert (world.rank, world.size) == (dist.get_rank(), 2)
    assert bodies.total(world, torch.ones(1)).item() == 2
    world.progress("heard by nobody")
    for refused in (lambda: world.check_mesh((2, 2)), lambda: Pool(2)):
        try:
            refused()
        except (MeshError, RequestError):
            print("refused", flush=True)
"""


@pytest.mark.multirank
def test_functions_of_ranks_run_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(UNDER_TORCHRUN))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.count("refused") == 4, done.stderr


def test_plain_program_has_no_world() -> None:
    assert current_world() is None


def test_dry_run_is_a_world() -> None:
    with dry_run(8, rank=3):
        world = current_world()
        assert world is not None
        assert (world.rank, world.size) == (3, 8)
        world.check_mesh((2, 4))
        with pytest.raises(MeshError, match="a mesh of 2 x 3 has 6 devices, and 8 processes run"):
            world.check_mesh((2, 3))
    assert current_world() is None


# ---- payloads ----


def test_payload_keeps_arrays_and_tensors() -> None:
    tensors = {
        "strided": torch.arange(5000.0)[::2],
        "bool": torch.ones(3, dtype=torch.bool),
        "empty": torch.empty(0, 4),
        "half": torch.ones(7, dtype=torch.bfloat16),
    }
    array = torch.arange(3000).numpy()
    parcel, fd = pack((tensors, array, array[:10]))
    try:
        again, back, few = unpack(parcel, fd)
    finally:
        if fd is not None:
            os.close(fd)
    for name, tensor in tensors.items():
        assert torch.equal(again[name], tensor)
        assert again[name].stride() == tensor.stride()
    assert (back == array).all()
    assert (few == array[:10]).all()
    back[0] = 5  # writable
    torch.set_rng_state(unpack(*pack(torch.get_rng_state())))
