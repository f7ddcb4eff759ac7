"""Bytes that a program of Inductor's holds, by operation and by line, known while it is made."""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch._inductor.codegen import wrapper as lines
from torch._inductor.virtualized import V

from planner._torch.compat import of_graphs
from planner._torch.inductor.order import FREED

SegmentedTree = of_graphs("torch._inductor.codegen.segmented_tree", "SegmentedTree")


@dataclass(frozen=True)
class Moments:
    """The memory, in bytes, of a program that frees each buffer right after the kernel that reads it last.

    Attributes:
        number: The place of each operation in the program.
        sizes: The size of each buffer that can be freed.
        allocated: For each operation the bytes in use while it runs: those that it allocates are there, and
            it has freed nothing yet.
        peak: The least peak of the program: a kernel may write its result over a buffer that it reads last.
    """

    number: dict[Any, int]
    sizes: dict[str, int]
    allocated: list[int]
    peak: int

    @staticmethod
    def of(scheduler: Any) -> "Moments":
        """The moments of the program that a scheduler orders, found once."""
        moments: Moments | None = vars(scheduler).get("planner_moments")
        if moments is None:
            moments = scheduler.planner_moments = _moments(scheduler)
        return moments


def _moments(scheduler: Any) -> Moments:
    sizes = _freed_inputs(scheduler)
    returned, live, peak = set(V.graph.get_output_names()), sum(sizes.values()), 0
    allocated = []
    for node in scheduler.nodes:
        inside = {part.get_name() for part in node.get_nodes()}
        made = {
            buffer.get_name(): bytes_of(buffer.node)
            for buffer in node.get_outputs()
            if buffer.get_name() not in scheduler.mutation_real_name
            and (buffer.get_name() in returned or not inside.issuperset(_readers(buffer)))
        }
        sizes.update(made)
        before, most = live, live + sum(made.values())
        live = most - sum(sizes.get(name, 0) for name in node.last_usage)
        allocated.append(most)
        peak = max(peak, most if node.is_extern() else max(before, live))
    number = {node: i for i, node in enumerate(scheduler.nodes)}
    return Moments(number, {k: v for k, v in sizes.items() if k not in returned}, allocated, peak)


def _freed_inputs(scheduler: Any) -> dict[str, int]:
    """Bytes of the inputs that a program frees; of views of each other by the last that is read."""
    last_of_storage = {
        name.removeprefix(FREED).partition("_")[0]: name
        for node in scheduler.nodes
        for name in node.last_usage
        if name.startswith(FREED)
    }
    return {name: bytes_of(V.graph.graph_inputs[name]) for name in last_of_storage.values()}


def _readers(buffer: Any) -> Iterable[str]:
    return (use.node.get_name() for use in buffer.users)


def bytes_of(buffer: Any) -> int:
    """The bytes of a buffer that is one tensor; 0 for others."""
    try:
        return int(V.graph.get_allocation_storage_size(buffer)) * int(buffer.get_dtype().itemsize)
    except (AttributeError, NotImplementedError, TypeError):
        return 0


class HeldByLine:
    """Lets a program use freed memory again, where it holds no more than without at any line.

    It is in the place of Inductor's estimate: what a buffer is freed for and allocated again takes time, and
    what is written into memory that was just read is in the caches. A buffer that waits for its next use is
    held meanwhile. Inductor estimates that by operations, before kernels are made of them, and only with its
    own reordering; here it is known from the program's lines. Nothing waits while an operator runs that
    allocates its results itself, as a convolution: what such kernels take besides is not known here.

    Attributes:
        overall_peak_memory: The most that may be held; Inductor's name for it.
    """

    def __init__(self) -> None:
        live = _freed_inputs(V.graph.scheduler)
        self._place: dict[int, int] = {}
        held: list[float] = []
        self.overall_peak_memory = 0
        program: list[Any] = V.graph.wrapper_code.lines
        for place, line in enumerate(program):
            _follow(live, line)
            self._place[id(line)] = place
            total = sum(live.values())
            self.overall_peak_memory = max(self.overall_peak_memory, total)
            held.append(math.inf if isinstance(line, lines.ExternKernelAllocLine) else total)
        self._held: Any = SegmentedTree(held or [0], operator.add, max, 0)

    def _between(self, freed: Any, allocated: Any) -> tuple[int, int]:
        return self._place[id(freed)], self._place[id(allocated)] - 1

    def peak_between(self, freed: Any, allocated: Any) -> float:
        """The most that is held from a line that frees to one that allocates; infinite if unknown."""
        most: float = self._held.summarize_range(*self._between(freed, allocated))
        return most

    def update_peak_between(self, freed: Any, allocated: Any) -> None:
        """The second line uses again what the first would free."""
        self._held.update_range(*self._between(freed, allocated), bytes_of(allocated.node))


def _follow(live: dict[str, int], line: Any) -> None:
    """Change what is live as a line does: bytes by the name of a buffer."""
    if isinstance(line, lines.MultiOutputLine):  # an operator's result gets a name of its own
        size = bytes_of(V.graph.get_buffer(line.result_name))
        live[line.arg_name] = live.get(line.arg_name, 0) - size
        live[line.result_name] = size
        return
    node = getattr(line, "node", None)
    name = "" if node is None else node.get_name()
    if name in V.graph.removed_buffers:
        return
    if isinstance(line, lines.AllocateLine | lines.ExternKernelAllocLine):
        live[name] = bytes_of(node) + sum(map(bytes_of, getattr(node, "outputs", ())))
    elif isinstance(line, lines.ReuseLine):
        live[line.reused_as.get_name()] = live.pop(name, 0)
    elif isinstance(line, lines.FreeIfNotReusedLine | lines.FreeLine):
        live.pop(name, None)
