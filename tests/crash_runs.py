"""Runs that are killed, share a store, or meet a full disk; started by ``test_store_writer.py``.

A process of its own, since it forks: no library that starts threads may be loaded here. Prints one
JSON object.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from storekit import PROVENANCE, all_files, samples_of, small_spec, write_store, write_task

from epcache.errors import SpaceError
from epcache.store.journal import read_journal
from epcache.store.writer import StoreWriter

SYSTEM_CALLS = ("fsync", "replace", "mkdir", "unlink", "rmdir")
SPEC = small_spec(num_rows={"train": 7, "val": 3})
ALL_TASKS = [list(task.key) for task in SPEC.tasks()]


def fork(function: Callable[[], object]) -> int:
    """Run a function in a process of its own; exit status 0 unless it raises."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def exit_of(pid: int) -> int:
    """Wait for a process; a negative number is the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def on_calls(action: Callable[[int], None]) -> None:
    """Have ``action`` see the number of each system call that changes a name or syncs."""
    count = 0

    def watched(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            action(count)
            return real(*args, **kwargs)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, watched(getattr(os, name)))


def die_at(number: int) -> Callable[[int], None]:
    def action(count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    return action


def finish(path: Path, log: Path) -> dict[str, object]:
    """Go on after a crash; say what was committed and what this run computed."""
    committed = [list(key) for key in read_journal(path)]
    log.write_text("")

    def note(task) -> None:
        with log.open("a") as file:
            file.write(json.dumps(task.key) + "\n")

    status = exit_of(fork(lambda: write_store(path, SPEC, on_task=note)))
    computed = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        "status": status,
        "committed": len(committed),
        "kept": computed == [task for task in ALL_TASKS if task not in committed],
        "same": all_files(path) == all_files(path.parent / "whole"),
    }


def kill_points(folder: Path, *, step: int) -> list[dict[str, object]]:
    """Kill a run at every ``step``-th of its system calls in turn, then finish it."""
    counted = folder / "count"

    def count_calls() -> None:
        on_calls(lambda count: counted.write_text(str(count)))
        write_store(folder / "counted", SPEC)

    assert exit_of(fork(count_calls)) == 0
    found = []
    for number in range(1, int(counted.read_text()) + 1, step):
        path = folder / "s"
        shutil.rmtree(path, ignore_errors=True)

        def killed(number: int = number, path: Path = path) -> None:
            on_calls(die_at(number))
            write_store(path, SPEC)

        status = exit_of(fork(killed))
        found.append({"killed": status, "at": number, **finish(path, folder / "log")})
    return found


def kill_anywhere(folder: Path, *, world_size: int, times: int) -> list[dict[str, object]]:
    """Kill runs, some of several ranks, after random delays; then finish as one process."""
    chance = random.Random(world_size)
    found = []
    for _ in range(times):
        path = folder / "s"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for _ in range(2):
            pids = run_ranks(path, world_size)
            time.sleep(chance.uniform(0.001, 0.06))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed = [exit_of(pid) for pid in pids]
        found.append({"killed": killed, **finish(path, folder / "log")})
    return found


def run_ranks(path: Path, world_size: int) -> list[int]:
    return [
        fork(lambda rank=rank: write_store(path, SPEC, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]


def ranks(folder: Path, *, times: int) -> list[dict[str, object]]:
    """Ranks side by side, 2, 3 and more than there are tasks."""
    found = []
    for world_size in (2, 3, 8):
        for _ in range(times):
            path = folder / "s"
            shutil.rmtree(path, ignore_errors=True)
            status = [exit_of(pid) for pid in run_ranks(path, world_size)]
            same = all_files(path) == all_files(folder / "whole")
            found.append({"world_size": world_size, "status": status, "same": same})
    return found


def seal_together(folder: Path, *, times: int) -> list[dict[str, object]]:
    """Ranks that find every task committed at the same moment."""
    found = []
    for _ in range(times):
        path = folder / "s"
        shutil.rmtree(path, ignore_errors=True)
        ready, go = os.pipe(), os.pipe()

        def rank_run(rank: int, path: Path = path, ready=ready, go=go) -> None:
            os.close(go[1])
            with StoreWriter(path, SPEC, rank=rank, world_size=3) as store:
                store.begin(samples_of(SPEC), PROVENANCE, b"stands for a safetensors file")
                for task in store.tasks():
                    write_task(store, task)
                os.write(ready[1], b".")
                os.read(go[0], 1)  # returns when the parent closes its end
                assert store.seal()

        pids = [fork(lambda rank=rank: rank_run(rank)) for rank in range(3)]
        waiting = 0
        while waiting < 3:
            waiting += len(os.read(ready[0], 3))
        os.close(go[1])
        status = [exit_of(pid) for pid in pids]
        for handle in (*ready, go[0]):
            os.close(handle)
        found.append({"status": status, "same": all_files(path) == all_files(folder / "whole")})
    return found


def file_size_limits(folder: Path) -> list[dict[str, object]]:
    """The system refuses to let any file grow beyond a limit, at many limits."""
    largest = max(map(len, all_files(folder / "whole").values()))
    found = []
    for limit in range(0, largest + 400, 400):
        path, message = folder / "s", folder / "message"
        shutil.rmtree(path, ignore_errors=True)

        def limited(limit: int = limit, path: Path = path, message: Path = message) -> None:
            text = "finished"
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                write_store(path, SPEC)
            except SpaceError as error:
                text = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            message.write_text(text)

        status = exit_of(fork(limited))
        found.append({"limit": limit, "limited": status, **after_error(path, message.read_text())})
    return found


def journal_limits(folder: Path) -> list[dict[str, object]]:
    """The system takes only the first bytes of a journal line."""
    path, found = folder / "s", []
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with StoreWriter(path, SPEC) as store:
        store.begin(samples_of(SPEC), PROVENANCE, None)
        first, second, *_ = store.tasks()
        write_task(store, first)
        text = (path / "journal.jsonl").read_bytes()
        for more in range(0, len(text) // 2, 25):
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(text) + more, hard))
            try:
                write_task(store, second)
            except SpaceError as error:
                message = str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            whole = (path / "journal.jsonl").read_bytes() == text
            found.append({"more": more, "whole": whole, "message": message})
        write_task(store, second)
        found[-1]["whole"] &= list(read_journal(path)) == [first.key, second.key]
    return found


def after_error(path: Path, message: str) -> dict[str, object]:
    """What a failed run left, and whether it can be finished."""
    journal = path / "journal.jsonl"
    torn = journal.exists() and not journal.read_bytes().endswith(b"\n") and journal.stat().st_size
    left = [name for name in all_files(path) if name.startswith(".") and name[-1] != "/"]
    return {
        "message": message,
        "torn": bool(torn),
        "left": left,
        **finish(path, path.parent / "log"),
    }


def hold(path: Path) -> None:
    """Keep a store open for writing until killed."""
    with StoreWriter(path, SPEC) as store:
        store.begin(samples_of(SPEC), PROVENANCE, None)
        write_task(store, store.tasks()[0])
        print("holding", flush=True)
        time.sleep(600)


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "hold":
        hold(folder)
    write_store(folder / "whole", SPEC)
    result = {
        "kill_points": lambda folder: kill_points(folder, step=11),
        "kill_all_points": lambda folder: kill_points(folder, step=1),
        "kill_anywhere": lambda folder: [
            *kill_anywhere(folder, world_size=1, times=8),
            *kill_anywhere(folder, world_size=2, times=6),
        ],
        "ranks": lambda folder: ranks(folder, times=3),
        "seal_together": lambda folder: seal_together(folder, times=6),
        "file_size_limits": file_size_limits,
        "journal_limits": journal_limits,
    }[mode](folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
