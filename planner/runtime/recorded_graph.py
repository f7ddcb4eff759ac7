"""When a planned graph runs as recorded (``backend="cudagraphs"``), and what a recording reads and writes.

A planned graph is two functions, its forward and its backward. The first step of a shape runs as it is. In
the second both are recorded, into one pool, and from then on steps run what was recorded. What a recording
reads lies at fixed addresses: parameters and buffers where they are, all else in copies. What it writes lies
at fixed addresses too, which the next step overwrites. So

- outputs are handed out as copies;
- what the forward keeps for the backward is handed to autograd as tensors that hold no memory: the backward
  may free them while it is recorded, and may also run as it is, on what lies there;
- gradients of parameters are handed out as they are, and no forward runs as recorded while anybody holds
  one. Other gradients are copied, and all are where the plan counts gradients that are there at entry.

A step that no rule allows to run as recorded runs operator by operator, with a warning: that is always right.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from planner._torch import autograd, operators
from planner._torch.cuda.recorder import BoxedFunction, Recorder, at_same_address, holders
from planner._torch.execution.settings import settings
from planner._torch.fake import tree_leaves
from planner._torch.tensors import strided_copy
from planner._torch.tracing.definitions import kernel_switches
from planner._torch.versions import Watched
from planner.choices import CUDA_GRAPHS
from planner.compiled.calls import Call, Calls
from planner.graph.replay import rng
from planner.lowering.partition import user_outputs

MOST_RECORDINGS = 4
"""The most recordings of one graph, each but the first because its parameters have moved. Code that replaces
them so often may do so for ever, and each recording takes time: from then on the graph runs unrecorded."""

Tensor = torch.Tensor


def why_unrecordable(module: GraphModule, device: torch.device) -> str | None:
    """Why a graph of operator calls can never run as recorded; None if it may.

    Args:
        module: A forward or a backward.
        device: The device that is recorded.
    """
    for node in module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.SymInt | torch.SymFloat):
                return "sizes vary"
            if isinstance(value, Tensor) and value.device.type not in (device.type, "meta"):
                return f"{node.name} is on the {value.device.type}"
        if node.op != "call_function":
            continue
        if node.target in (rng.generator_state, rng.run_from_state):
            return "the plan draws random numbers again"  # from a state that a recording cannot read
        if operators.is_collective(node.target):
            return f"ranks take part in {node.target}"
        if operators.waits_for_data(node.target):
            return f"Python reads what {node.target} found in data"
        if operators.is_foreign(node.target):
            return f"{node.target} is not PyTorch's, and may do more than can be recorded"
    return None


@dataclass
class _Half:
    """A forward or a backward as it was recorded.

    Attributes:
        static: The arguments that it was recorded with, tensors at the addresses that it reads.
        copied: Positions of the arguments into which each step's values are copied.
        results: What it returned, tensors at the addresses that it writes.
        run: Runs the recording.
    """

    static: list[Any]
    copied: frozenset[int]
    results: list[Any]
    run: Callable[[], None]

    def copy(self, args: Sequence[Any]) -> None:
        """Copy a step's arguments to where the recording reads them."""
        for position in self.copied:
            self.static[position].copy_(args[position])


@dataclass
class _Recording:
    """A step as it was recorded.

    Attributes:
        where: The device and stream.
        settings: PyTorch's settings that select kernels.
        forward, backward: Its halves; `backward` is None until it is recorded.
        handed: The values that autograd keeps for the backward: tensors that hold no memory, and an
            `_Argument` for an argument of the forward, which each step passes on itself.
        owned: The same values as tensors that hold their memory, until the backward is recorded.
        gradients: Gradients in the pool that are handed out without a copy, each with the number of
            references to its storage before any was handed out.
    """

    where: object
    settings: tuple[Any, ...]
    forward: _Half
    handed: list[Any]
    owned: list[Any]
    backward: _Half | None = None
    gradients: list[tuple[Tensor, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Argument:
    """Stands for one of the forward's arguments."""

    position: int


class RecordedGraph:
    """The two functions of one planned graph, which run as recorded where the rules allow it.

    Args:
        device: The device of the module.
        make: Makes a recorder with a pool of its own.
        own: Returns the module's present parameters and buffers.
        calls: The calls of the module.
        warn: Tells the user why a step does not run as recorded.
        copies_gradients: Whether gradients are handed out as copies.
    """

    def __init__(
        self,
        device: torch.device,
        make: Callable[[], Recorder],
        own: Callable[[], Iterable[Tensor]],
        calls: Calls,
        warn: Callable[[str], None],
        *,
        copies_gradients: bool,
    ) -> None:
        self._device, self._calls, self._warn = device, calls, warn
        self._make_recorder, self._own_tensors = make, own
        self._copies_gradients = copies_gradients
        self._recorder = make()
        self._reasons_told: set[str] = set()
        self._stopped = False  # whether no step runs as recorded any more
        self._has_run = False  # whether a first step has run operator by operator
        self._to_forget = False  # whether the recording is freed after the backward that it awaits
        self._recordings = 0
        self._constants: set[int] = set()  # addresses of the tensors that the functions themselves hold
        self._recording: _Recording | None = None
        self._pending: Call | None = None  # the call whose backward reads what the recording keeps
        self._outputs = self._tangents = 0
        self._forward: BoxedFunction | None = None
        self._backward: BoxedFunction | None = None

    # ---- the functions that replace the two ----

    def forward(self, module: GraphModule, function: BoxedFunction) -> BoxedFunction:
        """The function to call instead of a forward."""
        outputs = user_outputs(module)
        if self._forward is not None or outputs is None:
            return function
        self._forward, self._outputs = function, outputs
        self._examine(module)
        return lambda args: self._run_forward(args)  # AOTAutograd sets an attribute of it

    def backward(self, module: GraphModule, function: BoxedFunction) -> BoxedFunction:
        """The function to call instead of a backward. Only the first one is recorded, which gets all
        outputs' gradients."""
        if self._backward is not None or self._forward is None:
            return function
        self._backward = function
        inputs = module.graph.find_nodes(op="placeholder")
        self._tangents = sum(node.name.startswith("tangents_") for node in inputs)
        self._examine(module)
        return lambda args: self._run_backward(args)

    def stop(self, reason: str) -> None:
        """Run nothing as recorded any more."""
        self._stopped = True
        self._tell(reason)
        self.forget()

    def forget(self) -> None:
        """Free the recording, at once or after the backward that it awaits; later steps record anew."""
        self._to_forget = self._is_awaited()
        if not self._to_forget:
            self._recording, self._recorder, self._pending = None, self._make_recorder(), None

    def _examine(self, module: GraphModule) -> None:
        """Note the constants of a graph, and stop if it can never be recorded."""
        self._constants |= _addresses(_constants(module))
        if reason := why_unrecordable(module, self._device):
            self.stop(reason)

    # ---- the forward ----

    def _run_forward(self, args: list[Any]) -> Sequence[Any]:
        """Run a forward, as recorded if it may be; the first one that may be is recorded."""
        assert self._forward is not None
        reason = None if self._stopped else self._why_not(args)
        if self._stopped or reason is not None:
            if reason:
                self._tell(reason)
            return self._forward(args)
        if not self._has_run:
            return self._run_first(args)
        if self._recording is None:
            try:
                self._recording = self._record_forward(args)
            except Exception as error:
                self.stop(f"it cannot be recorded ({' '.join(str(error).split())[:200]})")
                return self._forward(args)
        recording = self._recording
        half = recording.forward
        half.copy(args)
        half.run()
        self._pending = self._calls.last
        copies: dict[int, Tensor] = {}
        outputs = half.results[: self._outputs]
        for output in outputs:
            if isinstance(output, Tensor) and id(output) not in copies:
                copies[id(output)] = strided_copy(output)
        handed = [args[kept.position] if isinstance(kept, _Argument) else kept for kept in recording.handed]
        args.clear()
        return [*(copies.get(id(output), output) for output in outputs), *handed]

    def _why_not(self, args: Sequence[Any]) -> str | None:
        """Why a forward does not run as recorded: None if it does, "" if the user need not be told."""
        recording = self._recording
        if self._recorder.is_recording():
            return "the step is part of a recording of your own"
        if self._is_awaited():
            return "an earlier call still awaits its backward"
        if recording is None:
            return None
        if any(holders(gradient) > before for gradient, before in recording.gradients):
            return (
                "gradients of an earlier step are still held when a step begins: set them to None before the "
                "forward, or plan with accumulate=True"
            )
        if recording.where != self._recorder.where():
            return "it runs on another device or stream"
        if recording.settings != _settings():
            return "settings of PyTorch's kernels have changed"
        half = recording.forward
        if not all(map(_fits, half.static, args)):
            return "inputs are of other shapes"
        read_in_place = [i for i in range(len(args)) if i not in half.copied]
        unmoved = all(_same_place(half.static[i], args[i]) for i in read_in_place)
        return None if unmoved else self._begin_anew()

    def _is_awaited(self) -> bool:
        """Whether a backward will still read what the recording keeps."""
        return self._pending is not None and self._pending.is_held()

    def _begin_anew(self) -> str:
        """Forget the recording: this step runs operator by operator, the next one is recorded.

        Returns:
            The reason as of :meth:`_why_not`.
        """
        self.forget()
        self._recordings += 1
        if self._recordings < MOST_RECORDINGS:
            return ""
        self._stopped = True
        return f"parameters or buffers were replaced {MOST_RECORDINGS} times"

    def _run_first(self, args: list[Any]) -> Sequence[Any]:
        """Run a step operator by operator, and stop if it does something that a recording must not do."""
        assert self._forward is not None
        if not all(map(_is_plain, args)) or any(_device(a) not in (None, self._device) for a in args):
            self.stop("an input is no number and no plain tensor of the module's device")
            return self._forward(args)
        own, inputs = _addresses(self._own_tensors()), _addresses(args)
        others = Watched(
            {i: arg for i, arg in enumerate(args) if isinstance(arg, Tensor) and _address(arg) not in own}
        )
        results = self._forward(args)
        self._has_run = True
        if not all(map(_is_plain, results)):
            self.stop("a result is no number and no plain tensor")
            return results
        outputs = {id(out): _address(out) for out in results[: self._outputs] if isinstance(out, Tensor)}
        taken = [address for address in outputs.values() if address]  # 0: it has no elements
        if others.written():
            self.stop("it writes into an input")
        if inputs.intersection(taken) or len(set(taken)) < len(taken):
            self.stop("an output shares its memory with an input or another output")
        return results

    def _record_forward(self, args: Sequence[Any]) -> _Recording:
        """Record a forward with these arguments.

        Raises:
            Exception: It cannot be recorded.
        """
        assert self._forward is not None
        own = _addresses(self._own_tensors())
        copied = frozenset(
            i for i, arg in enumerate(args) if isinstance(arg, Tensor) and _address(arg) not in own
        )
        static = [
            strided_copy(arg) if i in copied else arg.detach() if isinstance(arg, Tensor) else arg
            for i, arg in enumerate(args)
        ]
        places = {id(arg): i for i, arg in enumerate(static) if isinstance(arg, Tensor)}
        inputs = _addresses(static) | self._constants
        recorder = self._recorder
        results, run = recorder.record(self._forward, list(static))

        def handed(kept: Any) -> Any:
            if id(kept) in places:
                return _Argument(places[id(kept)])
            # A view of an input is kept as it is: it has the input's version, so autograd notices writes.
            as_is = not isinstance(kept, Tensor) or kept.device != self._device or _address(kept) in inputs
            return kept if as_is else at_same_address(kept)

        owned = results[self._outputs :]
        if not any(isinstance(kept, Tensor) and _address(kept) not in inputs for kept in owned):
            raise RuntimeError("the forward keeps nothing for the backward")
        half = _Half(static, copied, results[: self._outputs], run)
        half.copy(args)  # into memory that lies over itself, as of an expanded tensor, nothing can be copied
        return _Recording(recorder.where(), _settings(), half, [*map(handed, owned)], owned)

    # ---- the backward ----

    def _run_backward(self, args: list[Any]) -> Sequence[Any]:
        """Run a backward, as recorded if its forward ran so and it may be; the first one is recorded."""
        assert self._backward is not None
        recording = self._recording
        if recording is None or self._pending is None or not self._is_of(recording, args):
            return self._backward(args)
        reason = self._why_not_backward(recording, args)
        if reason is not None:
            self._tell(reason)
            return self._backward(args)
        if recording.backward is None:
            try:
                recording.backward = self._record_backward(recording, args)
            except Exception as error:
                results, self._pending = self._backward(args), None
                self.stop(f"its backward cannot be recorded ({' '.join(str(error).split())[:200]})")
                return results
        half = recording.backward
        half.copy(self._tangents_of(args))
        args.clear()
        half.run()
        self._pending = None
        if self._to_forget:
            self.forget()
        not_copied = {id(gradient) for gradient, _ in recording.gradients}
        return [
            (result.detach() if id(result) in not_copied else strided_copy(result))
            if isinstance(result, Tensor)
            else result
            for result in half.results
        ]

    def _is_of(self, recording: _Recording, args: Sequence[Any]) -> bool:
        """Whether a backward is that of a forward that ran as recorded: it is given what that handed out."""
        given = [arg for arg in args[: len(args) - self._tangents] if isinstance(arg, Tensor)]
        handed = [kept for kept in recording.handed if isinstance(kept, Tensor | _Argument)]
        return len(given) == len(handed) and all(
            isinstance(kept, _Argument) or _same_place(kept, arg)
            for kept, arg in zip(handed, given, strict=True)
        )

    def _why_not_backward(self, recording: _Recording, args: Sequence[Any]) -> str | None:
        """Why a backward does not run as recorded; None if it does."""
        if autograd.graph_is_kept():
            return "the backward keeps its graph (retain_graph=True)"
        if self._recorder.is_recording():
            return "the step is part of a recording of your own"
        if recording.where != self._recorder.where():
            return "its backward runs on another device or stream"
        if recording.settings != _settings():
            return "settings of PyTorch's kernels have changed"
        tangents = self._tangents_of(args)
        if not all(map(_is_plain, tangents)):
            return "a gradient that arrives is of a class of its own"
        if recording.backward is not None and not all(map(_fits, recording.backward.static, tangents)):
            return "gradients arrive in other shapes or strides"
        return None

    def _record_backward(self, recording: _Recording, args: Sequence[Any]) -> _Half:
        """Record a backward with what the forward's recording keeps, and these gradients of outputs.

        Raises:
            Exception: It cannot be recorded.
        """
        assert self._backward is not None
        tangents = [strided_copy(t) if isinstance(t, Tensor) else t for t in self._tangents_of(args)]
        inputs = _addresses((*tangents, *recording.forward.static)) | self._constants
        numbers = [arg for arg in args[: len(args) - self._tangents] if not isinstance(arg, Tensor)]
        given = [*numbers, *(kept for kept in recording.owned if isinstance(kept, Tensor)), *tangents]
        recording.owned = []  # the backward frees what it has read
        results, run = self._recorder.record(self._backward, given)
        copied = frozenset(i for i, t in enumerate(tangents) if isinstance(t, Tensor))
        half = _Half(tangents, copied, results, run)
        half.copy(self._tangents_of(args))
        recording.gradients = [
            (results[i], holders(results[i])) for i in self._uncopied(recording, results, inputs)
        ]
        return half

    def _uncopied(self, recording: _Recording, results: Sequence[Any], inputs: Collection[int]) -> list[int]:
        """Positions of the gradients that are handed out as they are: of parameters that are passed once.

        Of a parameter that is passed several times, autograd adds the gradients up in place; memory that a
        recording holds must not be written so.

        Args:
            recording: The step.
            results: What the backward returned: a gradient for each argument of the forward.
            inputs: Addresses that the backward reads.
        """
        given = recording.forward
        if self._copies_gradients or len(results) != len(given.static):
            return []
        times_passed, times_returned = (
            Counter(_address(value) for value in values if isinstance(value, Tensor))
            for values in (given.static, results)
        )
        return [
            i
            for i, (arg, result) in enumerate(zip(given.static, results, strict=True))
            if isinstance(arg, Tensor) and isinstance(result, Tensor) and i not in given.copied
            if times_passed[_address(arg)] == times_returned[_address(result)] == 1
            if _address(result) not in inputs
        ]

    def _tangents_of(self, args: Sequence[Any]) -> Sequence[Any]:
        """The gradients of outputs, which are a backward's last arguments."""
        return args[len(args) - self._tangents :]

    def _tell(self, reason: str) -> None:
        """Warn, once for each reason, that a step does not run as recorded."""
        if reason not in self._reasons_told:
            self._reasons_told.add(reason)
            beside = "" if self._recording is None else ". Its memory lies beside that of the recorded graphs"
            warn_unrecorded(self._warn, reason + beside)


def warn_unrecorded(warn: Callable[[str], None], reason: str) -> None:
    """Tell the user why a step does not run as recorded."""
    warn(
        f"a step runs operator by operator, not as a recorded CUDA graph: {reason}. Plan with "
        f"backend='graph', or without {CUDA_GRAPHS!r} in backend_options=, if that stays so"
    )


def _settings() -> tuple[Any, ...]:
    """PyTorch's settings that select kernels."""
    return (*settings(), *kernel_switches())


def _constants(module: GraphModule) -> Iterable[Any]:
    """The attributes of a graph module that its graph reads."""
    for node in module.graph.find_nodes(op="get_attr"):
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        yield value


def _address(tensor: Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has no elements."""
    return int(tensor.untyped_storage().data_ptr())


def _addresses(values: Iterable[Any]) -> set[int]:
    return {_address(v) for v in values if isinstance(v, Tensor)} - {0}


def _device(value: Any) -> torch.device | None:
    """A tensor's device; None for a number."""
    return value.device if isinstance(value, Tensor) else None


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, None, or a strided tensor or parameter with its values in memory."""
    if isinstance(value, Tensor):
        lazy = value.is_conj() or value.is_neg()  # what lies there is not the value
        return type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not lazy
    return value is None or isinstance(value, bool | int | float)


def _fits(static: Any, given: Any) -> bool:
    """Whether a step's argument can be copied to where the recording reads it, or is the same number."""
    if not isinstance(static, Tensor):
        return type(static) is type(given) and bool(static == given)
    return isinstance(given, Tensor) and (
        (static.shape, static.stride(), static.dtype, static.device)
        == (given.shape, given.stride(), given.dtype, given.device)
    )


def _same_place(static: Any, given: Any) -> bool:
    """Whether a step's argument lies where the recording reads it, or is no tensor."""
    return not isinstance(static, Tensor) or static.data_ptr() == given.data_ptr()
