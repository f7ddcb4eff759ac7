"""Settings under which kernels of a CPU take other memory, though the operators are the same."""

import torch

from planner._torch.tracing.definitions import onednn_is_on
from planner.errors import warn
from planner.planfile.plan import PlanRecord


class CpuSettings:
    """What the steps of a plan began under: how many threads, each with scratch of its own, and oneDNN."""

    def __init__(self, plan: PlanRecord) -> None:
        threads = plan.created_with.get("threads", "")
        self._threads = int(threads) if threads.isdecimal() else None  # of a plan for a CPU
        self._onednn: bool | None = None

    def check(self) -> None:
        """Warn where a step begins under settings by which it may take more than predicted."""
        if self._threads is None:
            return
        threads, onednn, other = torch.get_num_threads(), onednn_is_on(), list[str]()
        if threads > self._threads:
            other.append(f"torch.get_num_threads() is {threads}, and was {self._threads}")
        if onednn is not self._onednn is not None:
            other.append("torch.backends.mkldnn.enabled was changed")
        self._threads, self._onednn = threads, onednn
        if other:
            warn(
                f"{', '.join(other)}: kernels take other memory than when the step was planned, or first "
                "begun, and it may take more than predicted. Plan it under the settings it is trained with"
            )
