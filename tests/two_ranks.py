"""Two processes that train together, over gloo on this machine."""

import socket
from collections.abc import Callable
from pathlib import Path

import torch

SECONDS = 500


def run_two_ranks(process: Callable[[int, int, Path], None], folder: Path) -> None:
    """Run a function in two processes, given the rank, the port to meet at, and a folder for what they say.

    A process that takes longer than ``SECONDS`` is ended; what it did not write is missing in the folder.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=process, args=(rank, port, folder), daemon=True) for rank in (0, 1)]
    for started in processes:
        started.start()
    for started in processes:
        started.join(SECONDS)
        started.kill()
