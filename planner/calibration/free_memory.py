"""How much of a GPU's memory is free before this process uses it, as another process sees it.

A process cannot ask for itself: asking creates its own context, the very thing to measure.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_SECONDS = 60.0
_SCRIPT = """
import sys, torch
torch.ones(1, device=sys.argv[1])
torch.cuda.synchronize()
print(torch.cuda.mem_get_info(sys.argv[1])[0], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def free_beside_another(device: str) -> Iterator[int | None]:
    """Run another process that has a context on a device, and tell the bytes that are free beside it.

    Measure differences to these bytes inside the ``with`` block: the other process' context takes memory as
    long as the block lasts.

    Args:
        device: "cuda", "cuda:1".

    Yields:
        The bytes; None where they could not be asked for.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, device],
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
            process.communicate(timeout=_SECONDS)  # closes its standard input, whose end it waits for
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
