"""Two processes that train together, or more, over gloo on this machine."""

import contextlib
import faulthandler
import os
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from tests.searches import plan_by_the_roofline, shorten_searches

SECONDS = 400


def run_ranks(
    work: Callable[[Path], None], factory: pytest.TempPathFactory, name: str, count: int = 2
) -> Path:
    """Run a function in the processes of one group; return the folder for their reports.

    It runs once, even if pytest's workers share the tests that read the folder. A process that takes longer
    than ``SECONDS`` is ended. ``what_a_rank_says`` reads a report.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks of {name}"
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return folder
        folder.mkdir()
        start_ranks(work, folder, count)
    return folder


def start_ranks(work: Callable[[Path], None], folder: Path, count: int, seconds: float = SECONDS) -> None:
    """Run a function in the processes of one group, with an existing folder; wait until all have ended."""
    context = torch.multiprocessing.get_context("forkserver")
    # Imported once for all processes.
    context.set_forkserver_preload(["planner.api", "torch.distributed.fsdp"])
    processes = [
        context.Process(target=_rank, args=(r, count, work, folder, seconds), daemon=True)
        for r in range(count)
    ]
    for started in processes:
        started.start()
    end = time.monotonic() + seconds
    for started in processes:
        started.join(max(end - time.monotonic(), 1))
        started.kill()
    for rank, ended in enumerate(processes):
        ended.join()
        with (folder / f"end.{rank}").open("a") as report:
            print(f"exit code {ended.exitcode}", file=report)


def say_each(names: Iterable[str], said_of: Callable[[str], str], folder: Path) -> None:
    """Write the report of each case to the file ``name.rank``; the traceback of one that fails."""
    for name in names:
        try:
            said = said_of(name)
        except Exception:
            said = traceback.format_exc()
        (folder / f"{name}.{dist.get_rank()}").write_text(said)


def what_a_rank_says(folder: Path, name: str, rank: int) -> str:
    """The report of a rank from the file ``name.rank``; how the rank ended, if it wrote none."""
    report = folder / f"{name}.{rank}"
    if report.exists():
        return report.read_text()
    return f"rank {rank} did not come to it: {(folder / f'end.{rank}').read_text()[-2000:]}"


def _rank(rank: int, count: int, work: Callable[[Path], None], folder: Path, seconds: float) -> None:
    with (folder / f"end.{rank}").open("w") as end:
        faulthandler.enable(file=end)
        faulthandler.dump_traceback_later(seconds - 10, file=end)
        torch.set_num_threads(1)
        store = _store(rank, count, folder / "port")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        try:
            with pytest.MonkeyPatch.context() as patch:
                plan_by_the_roofline(patch)
                shorten_searches(patch)
                work(folder)
        except BaseException:
            traceback.print_exc(file=end)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        _wait_for_all(store, rank, count)
        dist.destroy_process_group()


def _wait_for_all(store: dist.Store, rank: int, count: int) -> None:
    """Wait until all ranks have done their work: gloo may still be sending what a collective has returned."""
    store.set(f"done {rank}", "")
    with contextlib.suppress(RuntimeError):  # rank 0, which has the store, ends once all have done it
        store.wait([f"done {other}" for other in range(count)], timedelta(seconds=60))


def _store(rank: int, count: int, port: Path) -> dist.Store:
    """The store where the ranks meet, as under torchrun.

    Rank 0 opens the port and then names it to the others, so that no other process can take it.
    """
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), count, is_master=False)
