"""The order of Inductor's programs, kept near to that of the graph: what a schedule frees is freed as early.

Seen to work with torch 2.13.
"""

import bisect
import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import lowering
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from planner._torch.operators import OpOverload

aten: Any = torch.ops.aten

KEPT, FREED = "arg_kept_", "arg_freed_"
"""How inputs are named that outlive a program, and those that it frees, with the number of their storage.

Inductor takes "arg" for what is not freed. It shares a buffer between values that are apart in time where its
estimate of the peak lets it, and an estimate with what is freed let it do so too often.
"""

_CALLS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.convolution.default, aten.convolution_backward.default,
    }
)  # fmt: skip
"""What Inductor has lowerings for that call a library."""

_VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default,
        aten.transpose.int, aten.t.default, aten.expand.default, aten.unsqueeze.default,
        aten.squeeze.dims, aten.squeeze.dim, aten.alias.default, aten.slice.Tensor, aten.select.int,
    }
)  # fmt: skip


def realize_in_place(traced: GraphModule) -> None:
    """Have results computed where the graph has them, if that frees more.

    Inductor computes the result of a pointwise operation where it is read, and holds what it is computed from
    until then. Beside a copy that a product takes there is what was copied, and all that the schedule put
    between the two: what a call of a library reads is computed at its own place. So is what is read after
    a later call, if it is smaller than what is read for it only, as a sum is that is read early and late.

    Args:
        traced: A graph whose inputs are named by :data:`KEPT` and :data:`FREED`.
    """
    place = {node: i for i, node in enumerate(traced.graph.nodes)}
    calls = [i for node, i in place.items() if _calls_library(node)]
    realized: set[Node] = set()
    for node in traced.graph.nodes:
        if not _is_pointwise(node):
            continue
        after = bisect.bisect_right(calls, place[node])
        until = calls[after] if after < len(calls) else len(place)
        late = any(reader > until for reader in _readers_of(node, place, realized))
        if _goes_to_library(node) or (late and _frees_more(node, until, place, realized)):
            node.meta["inductor_realize_to_strides"] = True
            realized.add(node)


def _frees_more(node: Node, until: int, place: dict[Node, int], realized: set[Node]) -> bool:
    """Whether what is read for a result only, and by others before a place, is larger than the result."""
    freed = sum(
        _size(source)
        for source in _sources(node, realized)
        if not source.name.startswith(KEPT)
        and all(reader <= until for reader in _readers_of(source, place, realized | {node}))
    )
    return freed > _size(node)


def _sources(node: Node, realized: set[Node]) -> set[Node]:
    """What is in memory of that a result is computed from."""
    found: set[Node] = set()
    seen: set[Node] = set()
    ahead = [node]
    while ahead:
        for source in set(ahead.pop().all_input_nodes) - seen:
            seen.add(source)
            inlined = source not in realized and (_is_view(source) or _is_pointwise(source))
            (ahead.append if inlined else found.add)(source)
    return found


def _readers_of(node: Node, place: dict[Node, int], realized: set[Node]) -> set[int]:
    """The places where a value is read, for results that are computed there, too."""
    seen: set[Node] = set()
    ahead = [node]
    while ahead:
        for user in ahead.pop().users.keys() - seen:
            seen.add(user)
            if _is_view(user) or (_is_pointwise(user) and user not in realized):
                ahead.append(user)
    return {place[user] for user in seen}


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and node.target in _VIEWS


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (node.target is aten.clone.default or torch.Tag.pointwise in tags)


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0


def _goes_to_library(node: Node) -> bool:
    return any(_calls_library(user) or (_is_view(user) and _goes_to_library(user)) for user in node.users)


def _calls_library(node: Node) -> bool:
    target = node.target
    # What has no lowering becomes a fallback when Inductor first meets it in a process.
    called = target in lowering.fallbacks or (
        isinstance(target, OpOverload) and target not in lowering.lowerings
    )
    return node.op == "call_function" and (target in _CALLS or called)


@contextlib.contextmanager
def kernels_of_plans() -> Iterator[None]:
    """While this is open, kernels of plans hold no more, and no longer, than their place in the plan says.

    Inductor makes one kernel for the CPU of all that lies between two calls of libraries, and frees nothing
    before it returns: here a kernel ends where what it would hold longer raises the peak of its program.

    It also fuses kernels that read the same, however far apart they are: sums for the gradients of biases
    wait for those of the module's next use, and what is to be computed again late is computed with what comes
    early. What they read, or return, is held as long, and a schedule for little memory becomes one for much.
    Here only what no call of a library lies between is fused.
    """
    flushed: Any = CppScheduling.ready_to_flush
    fused: Any = Scheduler.can_fuse

    def ready_to_flush(self: Any) -> Any:
        return flushed(self) or (isinstance(V.choices, ChoicesOfPlans) and _raises_peak(V.graph.scheduler))

    def can_fuse(self: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> Any:
        # Not as one of Inductor's choices: it asks for these when it has compared all that two kernels read,
        # and most pairs of a long program lie apart.
        if isinstance(V.choices, ChoicesOfPlans) and _apart(self, node1, node2):
            return False
        return fused(self, node1, node2, *args, **kwargs)

    with (
        mock.patch.object(CppScheduling, "ready_to_flush", ready_to_flush),
        mock.patch.object(Scheduler, "can_fuse", can_fuse),
    ):
        yield


def _raises_peak(scheduler: Any) -> bool:
    """Whether what the kernel holds by now, and the next operation, are more than the program ever needs."""
    moments = vars(scheduler).get("moments")
    if moments is None:
        moments = scheduler.moments = _moments(scheduler)
    coming = moments.number.get(scheduler.current_node, len(moments.allocated)) + 1
    if coming >= len(moments.allocated) or scheduler.nodes[coming].is_extern():
        return False  # where a kernel ends anyway
    gone = scheduler.buffer_names_to_free - V.graph.removed_buffers - V.graph.wrapper_code.freed
    held = sum(moments.sizes.get(name, 0) for name in gone)
    return held > 0 and bool(moments.allocated[coming] + held > moments.peak)


@dataclass(frozen=True)
class _Moments:
    """What a program takes whose kernels free at once what they read last, in bytes.

    Attributes:
        number: The place of each operation.
        sizes: Of each buffer that can be freed.
        allocated: Beside each operation, with all that it allocates and before it frees.
        peak: The least that the program needs: operations of kernels may write to what they read last.
    """

    number: dict[Any, int]
    sizes: dict[str, int]
    allocated: list[int]
    peak: int


def _moments(scheduler: Any) -> _Moments:
    last_of_storage = {  # inputs may be views of each other
        name.removeprefix(FREED).partition("_")[0]: name
        for node in scheduler.nodes
        for name in node.last_usage
        if name.startswith(FREED)
    }
    sizes = {name: _bytes(V.graph.graph_inputs[name]) for name in last_of_storage.values()}
    returned, live, peak = set(V.graph.get_output_names()), sum(sizes.values()), 0
    allocated = []
    for node in scheduler.nodes:
        inside = {part.get_name() for part in node.get_nodes()}
        made = {
            buffer.get_name(): _bytes(buffer.node)
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
    return _Moments(number, {k: v for k, v in sizes.items() if k not in returned}, allocated, peak)


def _readers(buffer: Any) -> Iterable[str]:
    return (use.node.get_name() for use in buffer.users)


def _bytes(buffer: Any) -> int:
    """Of a buffer that is one tensor; 0 for others."""
    try:
        return int(V.graph.get_allocation_storage_size(buffer)) * int(buffer.get_dtype().itemsize)
    except (AttributeError, NotImplementedError, TypeError):
        return 0


@functools.cache
def _digest_of_sources() -> str:
    """Of the files that decide what a program looks like: this one, and those beside it."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


class ChoicesOfPlans(InductorChoices):
    """Marks the programs of plans: only they are made by the rules of :func:`kernels_of_plans`."""

    def uuid(self) -> str:
        """For the key of Inductor's cache: a program of another version of this library is not taken."""
        return f"planner: {_digest_of_sources()}"


def _apart(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether a call of a library lies between two kernels."""
    first, second = sorted((node1, node2), key=lambda node: node.min_order)
    calls = vars(scheduler).get("calls_of_libraries")
    if calls is None:  # they keep their places when others are fused
        calls = sorted(node.min_order for node in scheduler.nodes if node.is_extern())
        scheduler.calls_of_libraries = calls
    at = bisect.bisect_right(calls, first.max_order)
    return at < len(calls) and calls[at] < second.min_order
