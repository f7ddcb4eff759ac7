"""Results that nodes of autograd write over a saved tensor, and what this changes of the solvers' graph.

A result that is written over an operand is an output of a row of its own, right after the call, which does
nothing else: so it takes memory only once the operand takes none.
"""

from collections.abc import Container, Mapping
from dataclasses import replace

from planner._torch.execution.written_over import can_write_over
from planner.graph.replay.packed import LEAST_ELEMENTS
from planner.replay.calls import DETACH
from planner.replay.capture import ReplayedStep
from solvers.model.graph import Op, Phase
from solvers.model.indices import BaseOp, ValueId, base_op


def find_overwritten(captured: ReplayedStep, remade: Container[int]) -> dict[int, int]:
    """By event, the save that its result can be written over: by then autograd and Python have freed all
    tensors in that storage.

    Args:
        captured: The recorded step.
        remade: The storages that calls can make again.
    """
    saved, recording, found = captured.saved, captured.compiled, dict[int, int]()
    calls = [None if event.call is None else recording.calls[event.call] for event in recording.events]
    freed: dict[int, list[int | None]] = {}  # by storage: when its saves are freed
    for save in saved.saves:
        freed.setdefault(save.storage, []).append(save.released)
    for number, save in enumerate(saved.saves):
        asked_once = len(save.unpacked) == 1 and not save.by_python
        if save.storage not in remade or not asked_once or save.released is None:
            continue
        reading = [
            (at, call)
            for at, call in enumerate(calls[save.unpacked[0] : save.released + 1], save.unpacked[0])
            if save.storage in saved.details[at].operands and call is not None and call.func is not DETACH
        ]
        if len(reading) != 1:  # calls that read a view of it count, too
            continue
        ((at, call),) = reading
        ends = [*freed[save.storage], recording.storages[save.storage].died_after]
        ends.remove(save.released)
        if any(end is None or end > at for end in ends):
            continue
        if can_write_over(call.func, call.args) and call.args[1].numel() >= LEAST_ELEMENTS:
            (gradient, read), (made,) = saved.details[at].operands[:2], recording.events[at].allocates
            if read == save.storage != gradient and recording.storages[made].died_after != at:
                found[at] = number
    return found


def overwrite(
    ops: list[Op], base_length: int, held: Mapping[BaseOp, tuple[BaseOp, ValueId]]
) -> dict[BaseOp, tuple[BaseOp, ValueId]]:
    """Let results be written over operands that nothing needs later, re-runs included.

    Args:
        ops: Base rows, then their re-runs; changed in place.
        base_length: The number of base rows.
        held: By row, the operand that its result can be written over, and the last row at which the node
            would otherwise hold that.

    Returns:
        Those of ``held`` that are written over.
    """
    row_of = {last_and_value: row for row, last_and_value in held.items()}
    # By value: the last row of the backward that reads it, or that a re-run reads it for.
    needed: dict[ValueId, int] = {}
    for i, op in enumerate(ops[:base_length]):
        if op.phase is Phase.BACKWARD:
            for value in op.inputs:
                needed[value] = max(needed.get(value, -1), row_of.get((base_op(i), value), i))
    for op in reversed(ops[:base_length]):
        if op.phase is Phase.FORWARD and op.recomputable:
            rerun = op if op.replay is None else ops[op.replay]
            last = max((needed.get(output, -1) for output in rerun.outputs), default=-1)
            for value in rerun.inputs:
                needed[value] = max(needed.get(value, -1), last)
    found = {row: by for row, by in held.items() if needed[by[1]] == row}
    for row, (last, value) in found.items():
        ops[row], ops[row + 1] = with_outputs_of(ops[row], ops[row + 1])
        if last != row:  # by then the result has the memory
            ops[last] = replace(ops[last], inputs=tuple(v for v in ops[last].inputs if v != value))
    return found


def with_outputs_of(op: Op, other: Op) -> tuple[Op, Op]:
    """Two operations, each with the outputs of the other."""
    return replace(op, outputs=other.outputs), replace(other, outputs=op.outputs)
