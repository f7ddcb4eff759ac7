"""A second comparison of tensors that differ, on a device whose kernels are not deterministic.

Some kernels of a GPU add in an order that varies. Their results may be equal in several steps and differ in
the next. So a planned step that differs from the unplanned ones need not be wrong: more unplanned steps show
how far these are apart. Tensors that still differ are compared bit for bit under deterministic kernels.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

from planner.errors import PlanWarning
from planner.verification.outcomes import Outcome, Spread

MORE_STEPS = 10
"""The most unplanned steps that are added: each may show a rarer result, and takes the time of a step."""


def recheck(
    spread: Spread, planned: Outcome, run_unplanned: Callable[[], Outcome], run_planned: Callable[[], Outcome]
) -> None:
    """Compare again the tensors in which a planned step differs from the unplanned ones.

    Args:
        spread: How far unplanned steps are apart. It gets the outcomes of more of them, and which tensors
            are equal under deterministic kernels.
        planned: The outcome of the planned step.
        run_unplanned, run_planned: Run another step from the same state.
    """
    for _ in range(MORE_STEPS):
        if not spread.differing(planned):
            return
        spread.add(run_unplanned())
    different = spread.differing(planned)
    if not different:
        return
    with warnings.catch_warnings(record=True) as caught, deterministic_kernels():
        warnings.simplefilter("always")
        outcomes = [run_unplanned(), run_unplanned(), run_planned(), run_planned()]
    messages = [w.message for w in caught if issubclass(w.category, PlanWarning)]
    for message in messages:
        warnings.warn(message, stacklevel=2)
    if not messages:  # with a warning a part of the step may have run without the plan
        spread.accept(different, outcomes)


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """A context in which PyTorch runs deterministic kernels where it has them."""
    kernels = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kernels[0], warn_only=kernels[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
