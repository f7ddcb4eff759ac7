"""Steps that PyTorch refuses to run, although they run on tensors without data."""

import re
from collections.abc import Iterable

from planner.costs.workspace import WorkspaceMeter
from planner.errors import CaptureError
from planner.training_step.call import Call

_DATA_DO_NOT_MATTER = re.compile(r"dtype|scalar type|not implemented for '", re.IGNORECASE)


def refuse_what_cannot_run(calls: Iterable[Call], meter: WorkspaceMeter) -> None:
    """See that an unplanned step would not fail on this device.

    Shapes are checked where there are no data, dtypes mostly in the kernels. The meter has run each
    operation on inputs of the same dtypes, with data that were made up; what it says about dtypes holds.

    Args:
        calls: The operations of the unplanned step, which the meter has measured.
        meter: It knows what failed.

    Raises:
        CaptureError: An operation does not run on such inputs.
    """
    for call, reason in meter.failed(calls):
        # What a backward is given the meter makes up too, and autograd casts on the way: only forwards tell.
        if _DATA_DO_NOT_MATTER.search(reason) and "backward" not in str(call.func):
            text = " ".join(reason.split())
            raise CaptureError(
                f"the step does not run without a plan either: {call.func} fails with {text}. Give the model "
                "inputs of the dtype that it takes"
            )
