"""How much of a GPU's memory is free before this process uses it, as another process sees it.

A process cannot ask that for itself: asking makes its own context, which is what is to be measured.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_SECONDS = 60.0
_ASKS = """
import sys, torch
torch.ones(1, device=sys.argv[1])
torch.cuda.synchronize()
print(torch.cuda.mem_get_info(sys.argv[1])[0], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def free_beside_another(device: str) -> Iterator[int | None]:
    """A context in which another process has a context on a device; gives the bytes that were free beside it.

    What is measured by the difference to them is measured within: the other's context counts as in use.

    Args:
        device: "cuda", "cuda:1".

    Yields:
        The bytes; None where they could not be asked for.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _ASKS, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        yield None
        return
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        yield int(said) if said else None
    finally:
        try:
            process.communicate(timeout=_SECONDS)  # which ends what it waits for
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
