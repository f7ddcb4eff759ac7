"""Recording a step without most of its alike layers, each of which hands on what it was given.

A layer in the middle of a chain of layers that are alike does what the others do. So a few at the beginning
and at the end of the chain run; those between them return what they are given of the layer before, and the
recording is made longer by what they would have done (:mod:`planner.capture.repeated.lengthened`). Whether
they are alike is seen when the graphs of the step are known: each must run the same graph, of like arguments.
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from planner._torch import modules, pytree
from planner._torch.autocast_state import autocast_state
from planner._torch.autograd import holders_of, is_hooked, next_node_number, running_node
from planner._torch.fake import storage_key
from planner._torch.without_data import fake_values
from planner._torch.without_data.plain import facts_of
from planner.capture.repeated.lengthened import AT_AN_END, IrregularError, Layers, lengthened
from planner.capture.repeated.ran import ENDED, Ran
from planner.module_parts import named_parts
from planner.training_step.recorder import Recording, StepRecorder
from planner.training_step.regions import Forward

AT_EACH_END = 4
"""How many layers run at the beginning of a chain, and at its end."""
_FEWEST = 2 * AT_EACH_END + 2
_PLAIN = (bool, int, float, str, type(None))


class LayersLeftOut:
    """The chains of alike layers in a module, of which a step is recorded without most.

    Args:
        module: The module, on tensors without data.
        regions: The names of the submodules that are layers, in order.
        added_to: The parameters that have gradients before the step.
    """

    def __init__(
        self, module: torch.nn.Module, regions: Sequence[str], added_to: Container[torch.Tensor]
    ) -> None:
        self._chains = _chains(module, regions, added_to)
        self._places = {layer: (chain, n) for chain in self._chains for n, layer in enumerate(chain.of)}
        self._recorder: StepRecorder | None = None

    def __bool__(self) -> bool:
        return bool(self._chains)

    @contextlib.contextmanager
    def recorded_by(self, recorder: StepRecorder, *, compiled: bool) -> Iterator[None]:
        """A context in which a step runs without them.

        Args:
            recorder: What records the step.
            compiled: Whether layers run what :meth:`around` returned; else their calls as they are.

        Raises:
            IrregularError: It does not run as one of alike layers does, or failed without them.
        """
        self._recorder = recorder
        for chain in self._chains:
            chain.begin()
        called = {} if compiled else self._places
        try:
            for layer in called:
                modules.install_call(layer, partial(self._call, layer))
            yield
        except Exception as error:
            raise IrregularError from error
        finally:
            for layer in called:
                modules.install_call(layer, None)
            self._recorder = None
        if not all(chain.ran_through() for chain in self._chains):
            raise IrregularError

    def around(self, forward: Forward) -> Forward:
        """What runs the forward of a layer, or leaves it out."""

        def run(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._recorder is None or module not in self._places:
                return forward(module, args, kwargs)
            chain, number = self._places[module]
            return chain.call(self._recorder, number, partial(forward, module, args, kwargs), args, kwargs)

        return run

    def _call(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What is called in the place of a layer."""
        assert self._recorder is not None
        chain, number = self._places[layer]
        run = partial(modules.module_call, layer, *args, **kwargs)
        return chain.call(self._recorder, number, run, args, kwargs)

    def lengthened(self, recording: Recording) -> tuple[Recording, int]:
        """The recording of the step with all layers, and how many events its forward has more.

        Raises:
            IrregularError: That cannot be told.
        """
        added: list[tuple[int, int]] = []  # of each chain, the events before it, and how many it is longer by
        for chain in self._chains:
            if chain.marks:
                begin = chain.marks[0][0]
                moved = sum(more for before, more in added if before < begin)
                recording, more = lengthened(recording, chain.layers(moved))
                added.append((begin, more))
        return recording, sum(more for _, more in added)

    def keep_all(self) -> None:
        """Leave no layer out."""
        self._chains.clear()
        self._places.clear()

    def are_alike(self, ran: Ran) -> bool:
        """Whether the layers that were left out did what others did in a step that ran graphs."""
        return all(chain.are_alike(ran) for chain in self._chains)


@dataclass
class _Tree:
    """The arguments of a call, or its results, without holding any tensor.

    Attributes:
        structure: How they are nested.
        plain: Those that are no tensors, by position.
        tensors: The tensors, by position.
        facts: What these are.
    """

    structure: Any
    plain: dict[int, tuple[type, object]] = field(default_factory=dict)
    tensors: dict[int, "weakref.ref[torch.Tensor]"] = field(default_factory=dict)
    facts: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Sequence[Any], structure: object) -> "_Tree":
        made = cls(structure)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                made.tensors[i], made.facts[i] = weakref.ref(leaf), facts_of(leaf)
            elif isinstance(leaf, _PLAIN):
                made.plain[i] = type(leaf), leaf
            else:
                raise IrregularError
        return made

    def is_like(self, other: "_Tree") -> bool:
        return (self.structure, self.plain, self.facts) == (other.structure, other.plain, other.facts)

    def find(self, tensor: torch.Tensor) -> int | None:
        return next((i for i, known in self.tensors.items() if known() is tensor), None)


class _Chain:
    """Layers that are called one after the other; see the module's docstring.

    Attributes:
        of: The layers.
        marks: Before each layer that ran, how many events there were, and the number of the next node.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self.of = layers
        self.begin()

    def begin(self) -> None:
        """Be called from the first on."""
        self._calls = 0
        self._given: list[_Tree] = []  # by call
        self._results: list[_Tree] = []
        self._around: object = None  # the modes in which they are called
        self._links: dict[int, int] = {}  # positions of results, by those of the next layer's arguments
        self._passed: dict[int, int] = {}  # positions of arguments, by those of results that they are
        self._holders: list[list[int]] = []  # of the tensors that layers get from those before, by call
        self._last = (0, 0)
        self.marks: list[tuple[int, int]] = []

    def ran_through(self) -> bool:
        """Whether each of them was called once; or none was."""
        return self._calls in (0, len(self.of))

    def layers(self, moved: int) -> Layers:
        """Which of them ran, where events have been put before them, so many."""
        events, nodes = zip(*self.marks, self._last, strict=True)
        left_out = len(self.of) - len(self.marks)
        return Layers(tuple(e + moved for e in events), nodes, left_out, AT_EACH_END)

    def are_alike(self, ran: Ran) -> bool:
        """Whether each of them, but for the first and the last, ran the same single graph, and no more."""
        if any(ENDED in call for layer in self.of for call in ran.get(layer, [])):
            return False
        found = [ran.get(layer, []) for layer in self.of[AT_AN_END:-AT_AN_END]]
        made = len(self._results[1].tensors) - len(self._passed) if self._calls else 0
        return not self._calls or all(
            len(calls) == 1 and calls == found[0] and len(calls[0]) == 1 and calls[0][0].is_all_of(made)
            for calls in found
        )

    def call(
        self,
        recorder: StepRecorder,
        number: int,
        run: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a layer, by ``run``, or leave it out."""
        here = len(recorder.recording.events), next_node_number()
        if number != self._calls or running_node() is not None or (number and here != self._last):
            raise IrregularError  # called in another order, again in a backward, or with something in between
        self._calls += 1
        self._look_at(args, kwargs)
        if AT_EACH_END <= number < len(self.of) - AT_EACH_END:
            result = self._handed_on(args, kwargs)
        else:
            self.marks.append(here)
            result = run()
            self._note(result, args, kwargs)
        self._last = len(recorder.recording.events), next_node_number()
        return result

    def _look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the arguments of a call with those of the call before: but for what that returned, they
        are the same tensors."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        given = _Tree.of(leaves, structure)
        around = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()
        self._given.append(given)
        number = len(self._given) - 1
        if number < 2:
            self._around = around
            return
        before, result = self._given[number - 1], self._results[number - 1]
        if around != self._around or not given.is_like(before):
            raise IrregularError
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        if number == 2:
            found = {i: result.find(t) for i, t in tensors.items() if before.find(t) is None}
            self._links = {i: at for i, at in found.items() if at is not None}
        for i, tensor in tensors.items():
            came_from = result.tensors[self._links[i]] if i in self._links else before.tensors[i]
            if came_from() is not tensor:
                raise IrregularError
        chained = [tensors[i] for i in self._links]
        if any(map(is_hooked, chained)) or any(given.facts[i] is None for i in self._links):
            raise IrregularError
        self._holders.append([n for t in chained for n in (sys.getrefcount(t), *holders_of(t))])
        self._compare_holders(number)

    def _compare_holders(self, number: int) -> None:
        """Compare how many hold what a layer gets: some results may be held beyond the next layer, or all.

        While layers are left out, it is the same tensor, held once more for each of them.
        """
        again = number - AT_EACH_END if number <= len(self.of) - AT_EACH_END else 0
        if again <= 0:
            expected = self._holders[0]
        elif again == 1:
            return
        else:
            one, two = self._holders[AT_EACH_END - 2], self._holders[AT_EACH_END - 1]
            expected = [n + again * (m - n) for n, m in zip(one, two, strict=True)]
        if self._holders[-1] != expected:
            raise IrregularError

    def _note(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a layer returned, and compare it with what the one before it did."""
        leaves, structure = pytree.tree_flatten(result)
        found, given = _Tree.of(leaves, structure), self._given[-1]
        self._results.append(found)
        at = {i: given.find(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        passed = {i: place for i, place in at.items() if place is not None}
        if len(self._results) == 2:
            self._passed = passed
        elif len(self._results) > 2 and not (passed == self._passed and found.is_like(self._results[1])):
            raise IrregularError

    def _handed_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for the result of a layer: the argument that the next one would get that result for."""
        known, given = self._results[1], self._given[-1]
        leaves = pytree.tree_leaves((args, kwargs))
        to_next = {result: i for i, result in self._links.items()}
        made: list[Any] = []
        for i in range(len(known.tensors) + len(known.plain)):
            if i in known.plain:
                made.append(known.plain[i][1])
                continue
            at = self._passed.get(i, to_next.get(i))
            if at is None or (i not in self._passed and given.facts[at] != known.facts[i]):
                raise IrregularError
            made.append(leaves[at])
        self._results.append(_Tree.of(made, known.structure))
        return pytree.tree_unflatten(made, known.structure)


def _chains(
    module: torch.nn.Module, regions: Sequence[str], added_to: Container[torch.Tensor]
) -> list[_Chain]:
    """Those of a module: layers that follow each other, are alike and have all they hold for themselves."""
    if len(regions) < _FEWEST or modules.hooks_on_all_modules():
        return []
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    held = Counter(storage_key(t) for part in parts for _, t in _held(part))
    described = []
    for name in regions:
        layer = module.get_submodule(name)
        described.append((name.rpartition(".")[0], _described(layer, held, added_to), layer))
    chains = []
    for (_, description), alike in groupby(described, key=itemgetter(0, 1)):
        layers = [layer for _, _, layer in alike]
        if description is not None and len(layers) >= _FEWEST:
            chains.append(_Chain(layers))
    return chains


def _held(part: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = (*part._parameters.items(), *part._buffers.items())
    return [(name, held) for name, held in named if held is not None and held.layout is torch.strided]


def _described(
    layer: torch.nn.Module, held: Mapping[int, int], added_to: Container[torch.Tensor]
) -> tuple[object, ...] | None:
    """What alike layers have in common; None of one that is not only what its code and its tensors say."""
    description: list[object] = []
    if modules.hooks_inside(layer):
        return None
    for name, part in named_parts(layer).items():
        if modules.installed_call(part) is not None:
            return None
        description.append((name, type(part), part.training))
        for of_part, tensor in _held(part):
            facts = facts_of(tensor) or fake_values.known_numbers(tensor)
            if facts is None or held[storage_key(tensor)] > 1 or is_hooked(tensor):
                return None
            description.append((of_part, type(tensor), facts, tensor in added_to))
    return tuple(description)
