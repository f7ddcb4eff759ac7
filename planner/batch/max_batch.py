"""The largest batch that fits a budget, found without running out of memory.

Two captures say how every byte and second grows with the batch (see :mod:`planner.batch.interpolate`). The
search
doubles and bisects on estimated steps, each solved in a second or two; a schedule that was found for one
batch is tried on the others first. The answer is captured and solved in full; where that capture says that
the estimate was off, the search goes on from it.
"""

from dataclasses import replace
from typing import Unpack

import torch

from planner.batch.interpolate import SizedSteps
from planner.batch.points import MaxBatch
from planner.batch.search import OVERHEADS, BatchSearch, MakeArguments, step
from planner.errors import BudgetError
from planner.graph.split.pieces import NothingToSplit
from planner.planfile.budget import parse_budget
from planner.planning.options import (
    SplitKeywords,
    check_options,
    read_options,
    refuse_in_flight,
    shows_options,
)
from planner.planning.prepare import prepare
from planner.planning.prepared import Prepared
from planner.planning.solve import find_solver
from planner.planning.split import in_pieces
from planner.progress import Progress
from planner.training_step.inputs import InputError, check_loss, check_model
from planner.training_step.step import tensors_in

PIECES = 32
"""In how many pieces a step of any batch is, with ``split=``: batches are alike then."""


@shows_options(SplitKeywords)
def max_batch(
    model: torch.nn.Module,
    make_args: MakeArguments,
    budget: int | str,
    *,
    max_overhead: float | None = 0.33,
    solver: str = "auto",
    start: int = 4,
    most: int = 1 << 20,
    time_limit: float = 60,
    progress: Progress | None = None,
    **options: Unpack[SplitKeywords],
) -> MaxBatch:
    """Find the largest batch (sequence length, image size) whose step fits a budget, and plan it.

    Args:
        model: Any module; it is not touched.
        make_args: Makes the inputs of a batch, in any form that :func:`planner.plan` takes as ``args``, or
            a pair of positional and keyword arguments. Tensors on the meta device do, and cost nothing. The
            states of random generators are restored after each call.
        budget: Bytes as an int or text ("32GiB") for the whole step; on a GPU for all that it takes of
            the device.
        max_overhead: The most that time per sample may rise over that of the largest unplanned batch:
            0.33 allows 33 %, about one more forward. None: whatever it takes, which may be several times
            the time.
        solver: As for :func:`planner.plan`.
        start: The first batch that is captured.
        most: No batch larger than this is tried.
        time_limit: Wall seconds for the plan of each captured answer.
        progress: Called with a text and a fraction from 0 to 1.
        **options: See :class:`planner.planning.options.PlanOptions`.

    Returns:
        The largest batch with its plan; ``.choices`` has the largest without a plan, the fastest, and the
        largest at other overheads.

    Raises:
        BudgetError: The budget is a percentage or "min", which say nothing without a batch.
        InputError: Model, inputs or loss are in no form that can be read.
        CaptureError: The step cannot be captured.
        InfeasibleBudget: Not even one sample fits; ``.minimum_bytes`` is what it needs.
        ValueError: ``max_overhead``, ``start`` or ``most`` is out of range.
    """
    if not callable(make_args):
        raise InputError(
            f"make_args is a {type(make_args).__name__}: expected a function from a batch to the inputs, "
            "as in lambda batch: (torch.empty(batch, 3, 224, 224),)"
        )
    check_model(model)
    check_options(max_overhead=max_overhead, start=start, most=most, progress=progress)
    given = read_options("max_batch", SplitKeywords, options, solver=solver, time_limit=time_limit)
    refuse_in_flight("max_batch", given)
    given = given.without_timing()
    check_loss(given.loss)
    most_bytes = parse_budget(budget, 2**60)
    if most_bytes.bytes is None or most_bytes.text.endswith("%"):
        raise BudgetError(f'budget {most_bytes.text!r} depends on the batch: give bytes, as "32GiB"')
    find_solver(solver)

    sizes: list[tuple[int, list[torch.Size]]] = []

    def capture(size: int, like: Prepared | None) -> Prepared:
        wanted = step(model, make_args, size, given.loss, given.outputs)
        sizes.append((size, [tensor.shape for tensor in tensors_in((wanted.args, dict(wanted.kwargs)))]))
        _check_samples(*sizes[0], *sizes[-1])
        prepared = prepare(
            model,
            replace(wanted, training=given.training),
            given,
            progress=lambda text, _: search.tell(f"batch {size}: {text}"),
            like=like,
        )
        if given.split == "none":
            return prepared
        try:
            return in_pieces(prepared, PIECES)
        except NothingToSplit:
            if size > 1:
                raise
            return prepared  # whose sample may be one row

    search = BatchSearch(
        SizedSteps(capture),
        most_bytes,
        solver=solver,
        effort=given.effort,
        time_limit=time_limit,
        most=most,
        progress=progress,
    )
    return search.run(min(start, most), max_overhead, OVERHEADS)


def _check_samples(first: int, shapes: list[torch.Size], size: int, found: list[torch.Size]) -> None:
    """Check that the inputs of a batch have as many samples as were asked for, by those of another batch.

    Raises:
        InputError: They have fewer, as slices of a data set do.
    """
    if [len(shape) for shape in shapes] != [len(shape) for shape in found]:
        return
    pairs = [
        pair for shape, other in zip(shapes, found, strict=True) for pair in zip(shape, other, strict=True)
    ]
    made = {now for before, now in pairs if before == first != now}
    if made and max(made) < size and size > first:
        raise InputError(
            f"make_args({size}) makes {max(made)} samples, and make_args({first}) as many as it is asked "
            f"for: make as many or more, or pass most={max(made)}"
        )
