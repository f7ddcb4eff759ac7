"""What a plan does to each module: operations, bytes and time, with layers that are alike in one line."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

from planner.errors import PlanFileError
from planner.planfile.plan import LiveModule, PlanRecord
from planner.planfile.simulated import simulated
from solvers.model.schedule import alive_at

_MOST_NAMES = 4
"""More modules of which nothing is re-run are counted in the table, not named."""
_DEEPEST = 100
"""Modules inside one another that are told apart, as each takes a level of Python's calls. All that a plan
file has below these is one module."""


@dataclass
class Share:
    """The forward operations of a module, those of modules inside it included, and the re-runs of them.

    Attributes:
        ops, recomputed_ops: How many operations there are, and how many of them the backward re-runs.
        recomputed_bytes, kept_bytes: Bytes of the results that are made again, and of those that are kept.
        seconds, recomputed_seconds: Predicted time of the operations, and of all re-runs.
    """

    ops: int = 0
    recomputed_ops: int = 0
    recomputed_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    recomputed_seconds: float = 0.0


@dataclass
class _Node:
    """A module, with the modules inside it by name; `own` is the share of its operations in none of these."""

    share: Share = field(default_factory=Share)
    recomputed_names: Counter[str] = field(default_factory=Counter)
    own: Share = field(default_factory=Share)
    children: dict[str, "_Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class ModuleRow:
    """One line of the table: a module, or several that are treated alike."""

    name: str
    """Its path from the module of the line that it is indented under; [0-2, 5] are four layers of a list."""
    depth: int
    """How many levels it is indented."""
    count: int
    """How many modules the line stands for; `share` is of all of them."""
    share: Share
    recomputed_names: tuple[str, ...]
    """Which operations are re-run, if not all are and no line for a module inside follows; else empty."""


def module_rows(plan: PlanRecord) -> list[ModuleRow]:
    """List the modules of a plan's forward, in order of their first operation.

    A module is one line if the plan re-runs all of it or nothing of it. Else lines for the modules inside it
    follow; the last is for those of which nothing is re-run. Layers of a list that are treated alike share a
    line.
    """
    root = _tree(plan)
    return list(_rows(root, "", 0, 1)) if root.share.ops else []


def folded_names(names: list[str]) -> list[str]:
    """Names of modules; those that differ in one number only become one: layers.[0-3]."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_starred(name), []).append(name)
    return [
        text
        for pattern, group in alike.items()
        for text in ([_numbered(pattern, group)] if len(group) > 1 and pattern.count("*") == 1 else group)
    ]


def folded_holders(plan: PlanRecord, most: int) -> list[LiveModule]:
    """List the modules whose results are alive at the peak, largest first; one line for those of all layers.

    Results that the model itself computes, outside of any module inside it, are listed by operation where the
    plan says which results are alive.

    Args:
        plan: The plan.
        most: How many lines to return; the last stands for all the others.
    """
    names: dict[str, list[str]] = {}
    sizes: Counter[str] = Counter()
    for holder in _with_operations(plan):
        pattern = _starred(holder.module) or "(the model)"
        names.setdefault(pattern, []).append(holder.module)
        sizes[pattern] += holder.bytes
    holders = []
    for pattern, size in sizes.most_common():
        alike = names[pattern]
        name = alike[0] or pattern
        if len(alike) > 1:
            name = f"{_numbered(pattern, alike)} x{len(alike)}"
        holders.append(LiveModule(module=name, bytes=size))
    if len(holders) > most:
        rest = holders[most - 1 :]
        last = LiveModule(module=f"({len(rest)} others)", bytes=sum(holder.bytes for holder in rest))
        holders = [*holders[: most - 1], last]
    return holders


def _with_operations(plan: PlanRecord) -> list[LiveModule]:
    """Bytes alive at the peak by module; results that no module inside the model made, by operation."""
    if plan.step is None or not any(holder.module == "" for holder in plan.peak_holders):
        return plan.peak_holders
    try:
        sim = simulated(plan)
    except PlanFileError:
        return plan.peak_holders
    graph, sizes = sim.graph, Counter[str]()
    for value in alive_at(graph, sim.schedule, sim.timeline.peak_step).tolist():
        record = sim.record(int(graph.producer[value]))
        # aten._log_softmax.default is written as log_softmax.
        name = (*record.name.split("."), record.name)[1].lstrip("_")
        sizes[record.module or name] += graph.values[value].bytes
    return [LiveModule(module=module, bytes=size) for module, size in sizes.most_common()]


def _tree(plan: PlanRecord) -> _Node:
    """The modules of a plan's forward inside one another, from the model itself."""
    root = _Node()
    for graph in (execution for each in plan.graphs for execution in each.by_execution):
        forward_length = graph.forward_length
        runs = Counter(op for op in graph.backward if op < forward_length and op not in graph.packed)
        # Masks are packed into bits. With offload what is packed is on the host, and takes nothing here.
        kept, packed = set(graph.kept), set(graph.packed if plan.target.offload == "none" else ())
        for index, op in enumerate(graph.ops[:forward_length]):
            node = root
            path = [node]
            for part in filter(None, op.module.split(".", _DEEPEST)):
                node = node.children.setdefault(part, _Node())
                path.append(node)
            node.recomputed_names[op.name] += runs[index]
            for share in (node.own, *(ancestor.share for ancestor in path)):
                share.ops += 1
                share.seconds += op.seconds
                share.kept_bytes += op.bytes if index in kept else 0
                share.kept_bytes += (op.bytes + 7) // 8 if index in packed else 0
                if runs[index]:
                    share.recomputed_ops += 1
                    share.recomputed_bytes += op.bytes
                    share.recomputed_seconds += op.seconds * runs[index]
    return root


def _rows(node: _Node, name: str, depth: int, count: int) -> Iterator[ModuleRow]:
    """The lines of a module and of those inside it; `name`, `depth` and `count` as in :class:`ModuleRow`."""
    # A module that only contains one other is written with it, as in bert.encoder.
    while len(node.children) == 1 and not node.own.ops:
        ((part, child),) = node.children.items()
        node, name = child, f"{name}.{part}" if name else part
    partly = 0 < node.share.recomputed_ops < node.share.ops
    names = tuple(sorted(+node.recomputed_names)) if partly else ()
    if not node.children or not partly:
        yield ModuleRow(name or "(the model)", depth, count, node.share, names)
        return
    yield ModuleRow(name or "(the model)", depth, count, node.share, ())
    untouched: list[tuple[str, Share]] = []
    if node.own.recomputed_ops:
        yield ModuleRow("(itself)", depth + 1, count, node.own, names)
    elif node.own.ops:
        untouched.append(("(itself)", node.own))
    for label, alike, child in _folded(node):
        if child.share.recomputed_ops:
            yield from _rows(child, label, depth + 1, count * alike)
        else:
            untouched.append((label, child.share))
    if untouched:
        labels = [label for label, _ in untouched]
        together = ", ".join(labels) if len(labels) <= _MOST_NAMES else f"({len(labels)} others)"
        yield ModuleRow(together, depth + 1, count, _sum([share for _, share in untouched]), ())


def _folded(node: _Node) -> Iterator[tuple[str, int, _Node]]:
    """The modules inside one: name, number and sum of those of a list that are treated alike, or of one."""
    alike: dict[object, list[str]] = {}
    for part, child in node.children.items():
        alike.setdefault(_signature(child) if part.isdecimal() else part, []).append(part)
    for parts in alike.values():
        label = parts[0] if len(parts) == 1 else f"[{_ranges([int(part) for part in parts])}]"
        yield label, len(parts), _merged([node.children[part] for part in parts])


def _starred(name: str) -> str:
    """The name of a module with a star for each number: layers.*.attention."""
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)


def _numbered(pattern: str, alike: list[str]) -> str:
    """One name for modules whose names differ in the star of a pattern; the pattern where they are not so."""
    if pattern.count("*") != 1 or len(set(alike)) != len(alike):
        return pattern
    place = pattern.split(".").index("*")
    numbers = [path.split(".")[place] for path in alike]
    if not all(map(str.isdecimal, numbers)):  # one of them is a module of that name
        return pattern
    return pattern.replace("*", f"[{_ranges([*map(int, numbers)])}]")


def _ranges(numbers: list[int]) -> str:
    """Numbers as text: 0, 1, 2 and 5 as ``0-2, 5``."""
    numbers = sorted(numbers)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _signature(node: _Node) -> tuple[object, ...]:
    """What is equal for modules that are treated alike."""
    # Times are left out: measured ones differ between layers that are treated alike.
    share = node.share
    children = tuple((name, _signature(child)) for name, child in node.children.items())
    names = tuple(sorted(node.recomputed_names.items()))
    return (share.ops, share.recomputed_ops, share.recomputed_bytes, share.kept_bytes, names, children)


def _merged(nodes: list[_Node]) -> _Node:
    """The sum of modules of equal signatures."""
    if len(nodes) == 1:
        return nodes[0]
    names: Counter[str] = sum((node.recomputed_names for node in nodes), Counter())
    children = {name: _merged([node.children[name] for node in nodes]) for name in nodes[0].children}
    share, own = _sum([node.share for node in nodes]), _sum([node.own for node in nodes])
    return _Node(share, names, own, children)


def _sum(shares: list[Share]) -> Share:
    return Share(*(sum(values) for values in zip(*map(astuple, shares), strict=True)))
