"""Private PyTorch APIs: what Dynamo's callback answers where capturing fails.

Tested with torch 2.13.
"""

from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo.types import ConvertFrameReturn


class RunsAsItIs:
    """Dynamo's callback, by which a frame that cannot be captured runs as it is.

    Args:
        callback: The callback that captures.
        failed: Called with the error; raises what is to be raised.
    """

    def __init__(self, callback: Any, failed: Callable[[Exception], None]) -> None:
        # Under this name Dynamo looks for the backend that a callback ends in.
        self._torchdynamo_orig_backend = callback
        self._failed = failed

    def __call__(self, *frame: Any) -> Any:
        try:
            return self._torchdynamo_orig_backend(*frame)
        except Exception as error:
            self._failed(error)
        # What it calls runs as it is, too. The next call is captured again: the error may be of the user's
        # own code, which raises it as it runs, and may not raise it the next time.
        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        return ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)
