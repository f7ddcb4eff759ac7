"""How much of a GPU's memory is free before this process uses it, as another process sees it.

A process cannot ask that for itself: asking makes its own context, which is what is to be measured.
"""

import subprocess
import sys

_SECONDS = 60.0
_ASKS = """
import sys, torch
torch.ones(1, device=sys.argv[1])
torch.cuda.synchronize()
print(torch.cuda.mem_get_info(sys.argv[1])[0], flush=True)
sys.stdin.read()
"""


class Witness:
    """A process with a context of its own on a device, which ends with this one's interest in it.

    Attributes:
        free_bytes: What is free of the device beside that process's own context; None where it could not
            be asked.
    """

    def __init__(self, device: str) -> None:
        """
        Args:
            device: "cuda", "cuda:1".
        """
        self.free_bytes: int | None = None
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ASKS, device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert self._process.stdout is not None
            self.free_bytes = int(self._process.stdout.readline())
        except (OSError, ValueError):  # it could not be started, or there is no such device
            self.close()

    def close(self) -> None:
        """End the process. Call it when what is to be measured has been: its context counts as in use."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def __enter__(self) -> "Witness":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
