"""A second look at tensors that differ, on a device whose kernels may differ from run to run.

A GPU does some sums in any order: the result is often equal for several steps, and then another. Where the
planned step differs from the unplanned one, more unplanned steps are run, to see how far these are apart.
Tensors that still differ are compared once more under deterministic kernels, bit for bit.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

from planner.errors import PlanWarning
from planner.verification.outcomes import Outcome, Spread

MORE_STEPS = 10
"""How many more unplanned steps are run at most."""


def look_again(
    spread: Spread, planned: Outcome, run_unplanned: Callable[[], Outcome], run_planned: Callable[[], Outcome]
) -> None:
    """Look again at the tensors in which a planned step seems to differ from unplanned ones.

    Args:
        spread: How far unplanned steps are apart; further ones are added.
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
        spread.settle(different, [run_unplanned(), run_unplanned()], [run_planned(), run_planned()])
    said = [w.message for w in caught if issubclass(w.category, PlanWarning)]
    for message in said:
        warnings.warn(message, stacklevel=2)
    if said:  # some of it did not run by the plan
        spread.unsettle()


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
