"""What Inductor fuses in the programs of plans, and where a kernel ends.

Seen to work with torch 2.13.
"""

import bisect
import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import wrapper
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V

from planner._torch.inductor.elsewhere import LOWERED_FOR
from planner._torch.inductor.fusion_names import Fusion
from planner._torch.inductor.memory import HeldByLine, Moments, bytes_of
from planner._torch.patches import replaced


@contextlib.contextmanager
def kernels_of_plans() -> Iterator[None]:
    """While this is open, kernels of plans hold no more, and no longer, than :data:`CHOICES` say.

    Inductor makes one kernel for the CPU of all that lies between two calls of libraries, and frees nothing
    before it returns: here a kernel ends where what it would hold longer raises the peak of its program.

    It also fuses kernels that read the same, however far apart they are: sums for the gradients of biases
    wait for those of the module's next use, and what is to be computed again late is computed with what comes
    early. What they read, or return, is held as long, and a schedule for little memory becomes one for much.

    Memory that is freed and allocated again is held in between, where that costs nothing.
    """
    flushed: Any = CppScheduling.ready_to_flush
    fused: Any = Scheduler.can_fuse
    estimated: Any = wrapper.EfficientPeakEstimate

    def ready_to_flush(self: Any) -> Any:
        return flushed(self) or (_fusion() != "anywhere" and _raises_peak(V.graph.scheduler))

    def can_fuse(self: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> Any:
        # Not as one of Inductor's choices: it asks for these when it has compared all that two kernels read,
        # and most pairs of a long program lie apart.
        if _fusion() != "anywhere" and _apart(self, node1, node2):
            return False
        return fused(self, node1, node2, *args, **kwargs)

    def estimate() -> Any:
        return HeldByLine() if isinstance(V.choices, ChoicesOfPlans) else estimated()

    with (
        replaced(CppScheduling, {"ready_to_flush": ready_to_flush}),
        replaced(Scheduler, {"can_fuse": can_fuse}),
        replaced(wrapper, {"EfficientPeakEstimate": estimate}),
    ):
        yield


def _raises_peak(scheduler: Any) -> bool:
    """Whether what the kernel holds by now, and the next operation, are more than the program ever needs."""
    moments = Moments.of(scheduler)
    coming = moments.number.get(scheduler.current_node, len(moments.allocated)) + 1
    if coming >= len(moments.allocated) or scheduler.nodes[coming].is_extern():
        return False  # where a kernel ends anyway
    gone = scheduler.buffer_names_to_free - V.graph.removed_buffers - V.graph.wrapper_code.freed
    held = sum(moments.sizes.get(name, 0) for name in gone)
    return held > 0 and bool(moments.allocated[coming] + held > moments.peak)


@functools.cache
def _digest_of_sources() -> str:
    """A digest of the files that decide what a program looks like: this one, and those beside it."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


class ChoicesOfPlans(InductorChoices):
    """Marks the programs of plans, and says what is fused in them.

    Attributes:
        fusion: See :data:`planner._torch.inductor.fusion_names.Fusion`.
    """

    fusion: Fusion = "in-order"

    def uuid(self) -> str:
        """For the key of Inductor's cache: a program of another version of this library, or for another GPU,
        is not taken."""
        return f"planner: {_digest_of_sources()}, {self.fusion}, {LOWERED_FOR.get()}"


class _Earlier(ChoicesOfPlans):
    fusion: Fusion = "earlier"


class _Anywhere(ChoicesOfPlans):
    fusion: Fusion = "anywhere"


CHOICES: dict[Fusion, type[ChoicesOfPlans]] = {
    choices.fusion: choices for choices in (ChoicesOfPlans, _Earlier, _Anywhere)
}
"""Inductor's choices for the programs of plans."""


def _fusion() -> Fusion:
    """How the program that is made now is fused; as Inductor does it, where it is no plan's."""
    return V.choices.fusion if isinstance(V.choices, ChoicesOfPlans) else "anywhere"


def _apart(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether a call of a library lies between two kernels, and the later one may not come before it."""
    first, second = sorted((node1, node2), key=lambda node: node.min_order)
    places = vars(scheduler).get("planner_places")
    if places is None:  # they keep their places when others are fused
        places = scheduler.planner_places = _Places.of(scheduler)
    at = bisect.bisect_right(places.calls, first.max_order)
    between = at < len(places.calls) and places.calls[at] < second.min_order
    return between and not (_fusion() == "earlier" and _comes_earlier(scheduler, places, first, second))


@dataclass(frozen=True)
class _Places:
    """The places of operations of a program, in the order in which Inductor found them.

    Attributes:
        calls: The places of calls of libraries.
        readers: By the name of a buffer: the places of the operations that read it.
        returned: The names of the buffers that the program returns.
    """

    calls: list[int]
    readers: dict[str, list[int]]
    returned: frozenset[str]

    @staticmethod
    def of(scheduler: Any) -> "_Places":
        calls, readers = [], dict[str, list[int]]()
        for node in scheduler.nodes:
            if node.is_extern():
                calls.append(node.min_order)
            for name in node.used_or_aliased_buffer_names():
                readers.setdefault(name, []).append(node.min_order)
        return _Places(sorted(calls), readers, frozenset(V.graph.get_output_names()))


def _comes_earlier(scheduler: Any, places: _Places, first: Any, second: Any) -> bool:
    """Whether a kernel can be computed with an earlier one, and takes no memory of its own there.

    It reads nothing that is made after that one, and each of its results takes the place of what it is the
    last to read. So are the gradient of an activation and the activation that runs again: what both are
    computed from is read once, and let go of before the product of the second.
    """
    if second.has_aliasing_or_mutation() or first.has_aliasing_or_mutation():
        return False
    own, returned = second.get_buffer_names(), places.returned
    inside = {node.min_order for node in second.get_nodes()}
    dies: list[int] = []
    for name in {dep.name for dep in second.read_writes.reads} - own:
        buffer = scheduler.name_to_buf.get(name)
        if buffer is None:
            continue
        if buffer.defining_op.max_order > first.max_order:
            return False
        if name not in returned and all(
            at <= first.max_order for at in places.readers[name] if at not in inside
        ):
            dies.append(bytes_of(buffer.node))
    for buffer in second.get_outputs():
        size = bytes_of(buffer.node)
        if size not in dies:
            return False
        dies.remove(size)
    return True
