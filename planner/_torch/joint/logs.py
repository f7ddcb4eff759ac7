"""AOTAutograd writes its graphs out as text for logs, also where nobody reads these."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from planner._torch.compat import of_graphs
from planner._torch.patches import replaced
from planner._torch.tracing.error_logs import traces_are_written

graph_compile = of_graphs("torch._functorch._aot_autograd", "graph_compile")

_WRITERS = {"_log_joint_graph": None, "_log_fw_bw_graphs": (None, None)}
"""What writes graphs out, and what it returns where logs are off."""


@contextlib.contextmanager
def logged_when_asked() -> Iterator[None]:
    """Within this, graphs are written out only where ``TORCH_LOGS`` or ``TORCH_TRACE`` asks for them."""
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    if traces_are_written() or any(log.isEnabledFor(logging.INFO) for log in logs):
        yield
        return
    writers = {name: _returns(result) for name, result in _WRITERS.items() if hasattr(graph_compile, name)}
    with replaced(graph_compile, writers):
        yield


def _returns(result: Any) -> Any:
    return lambda *args, **kwargs: result
