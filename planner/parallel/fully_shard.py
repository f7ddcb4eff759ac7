"""``fully_shard`` without other ranks: its allocations and frees, by hooks on a module without data.

The hooks are those of ``torch/distributed/fsdp/_fully_shard`` of PyTorch 2.13 to 2.15: the same order, the
same buffers, the same lifetimes. They communicate nothing. Names in backquotes are those of functions there.
The recorder of a step sees the buffers like any other tensor.

On the CPU gloo copies the gathered buffer once more, and the input of a reduction. NCCL does not; its own
memory is outside PyTorch's allocator and not counted. Streams order allocations as the CPU does, in the order
of the calls. On a GPU memory freed on one stream serves another stream only later, so the allocator may
reserve more.

With ``no_sync`` the whole gradients of earlier micro-batches are there throughout, and are added to
(:mod:`.unreduced`). The step then counts the most that any micro-batch allocates.

From PyTorch 2.15 on a parameter's ``grad_dtype`` is the type that its gradient is reduced in, and autograd
casts and adds up by itself: see :func:`planner._torch.distributed.autograd_sums_micro_batches`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from planner._torch.autograd import after_this_backward
from planner._torch.distributed import (
    autograd_sums_micro_batches,
    copy_for_reduction,
    is_whole_on_each_rank,
    local_gradient,
    local_tensor,
)
from planner.module_parts import parameters_of, parts_of
from planner.parallel.strategies import FSDP2, ParallelError
from planner.parallel.unreduced import Excess, reduced_in
from planner.training_step.step import map_tensors, tensors_in


class ShardedUnits:
    """The units of a model that ``fully_shard`` shards: regions, and the root with the rest.

    Args:
        model: The copy, with its parameters whole.
        names: Names of the regions.
        options: The options of ``fully_shard``.
        added_to: For each parameter, whether its sharded gradient is there already, and added to.
        copies: Whether communication copies its buffers, as gloo does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        options: FSDP2,
        added_to: Sequence[bool],
        *,
        copies: bool,
    ) -> None:
        self.options, self.copies = options, copies
        parameters = parameters_of(model)
        original = {id(p): p.dtype for p in parameters}
        added = {id(p) for p, there in zip(parameters, added_to, strict=True) if there}
        if options.param_dtype is not None:
            self._cast_parameters(model, original, added)
        self.reduced_in = {
            id(p): reduced_in(original[id(p)], options.param_dtype, options.reduce_dtype)
            for p in parameters_of(model)  # not ``parameters``: casts have replaced some of these
        }
        inside = {part for name in names for part in parts_of(model.get_submodule(name))}
        taken: set[int] = set()
        self.units: list[_Unit] = []
        for unit in [*options.units(names), ("",)]:
            modules = [model.get_submodule(name) for name in unit]
            root = modules == [model]
            parts = [p for module in modules for p in parts_of(module) if not root or p not in inside]
            held = (p for part in parts for p in part._parameters.values() if p is not None)
            own = {id(p): p for p in held if id(p) not in taken}
            taken |= own.keys()
            reshard = options.reshards(unit)
            self.units.append(_Unit(self, list(own.values()), original, added, modules, reshard, root=root))
        self.units.insert(0, self.units.pop())  # the root is the first, as named_modules() has it
        self.start()

    def adds_to(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a step adds to a parameter's ``grad``, which is there and whole.

        Unless autograd adds up, ``fully_shard`` keeps gradients of other types than the parameter's
        elsewhere.
        """
        is_whole = self.options.no_sync and parameter.requires_grad
        return is_whole and (
            autograd_sums_micro_batches() or self.reduced_in[id(parameter)] == parameter.dtype
        )

    def modules(self) -> Iterator[tuple[torch.nn.Module, int]]:
        """The modules of all units, each with the number of its unit; the root's is 0."""
        for number, unit in enumerate(self.units):
            for module in unit.modules:
                yield module, number

    def start(self) -> None:
        """Begin a step: forget the one before."""
        self.previous: Any = None  # the buffer of the previous all-gather, in the forward
        self.order: list[_Unit] = []
        self.reduced: list[torch.Tensor] = []
        self.excess = Excess()
        self.ending = False
        for unit in self.units:
            unit.start()

    def end_with_backward(self) -> None:
        """Have :meth:`end` called at the end of the backward that runs."""
        if not self.ending:
            self.ending = True
            after_this_backward(self.end)

    def end(self) -> None:
        """``_root_post_backward_final_callback``."""
        for unit in self.units:
            if unit.state != "after backward":
                unit.post_backward()
            unit.state, unit.gathered, unit.all_reduced = "idle", None, None
            unit.forwards.clear()
        self.order.clear()
        self.reduced.clear()
        self.excess.let_go()
        self.ending = False

    def _cast_parameters(
        self, model: torch.nn.Module, dtypes: dict[int, torch.dtype], added: set[int]
    ) -> None:
        """Replace parameters by casts of them; their own types are noted under the casts' identities."""
        replaced: dict[int, torch.nn.Parameter] = {}
        for part in model.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if not parameter.is_floating_point() or parameter.dtype == self.options.param_dtype:
                    continue
                if id(parameter) not in replaced:
                    cast = parameter.detach().to(self.options.param_dtype)
                    made = torch.nn.Parameter(cast, requires_grad=parameter.requires_grad)
                    replaced[id(parameter)] = made
                    dtypes[id(made)] = parameter.dtype
                    if id(parameter) in added:
                        added.add(id(made))
                setattr(part, name, replaced[id(parameter)])


class _Unit:
    """Parameters that are gathered and reduced together: ``FSDPParamGroup`` and its ``FSDPState``."""

    def __init__(
        self,
        shared: ShardedUnits,
        parameters: Sequence[torch.nn.Parameter],
        dtypes: dict[int, torch.dtype],
        added: set[int],
        modules: Sequence[torch.nn.Module],
        reshard: bool | int | None,
        *,
        root: bool,
    ) -> None:
        options = shared.options
        self._shared, self._root, self._world = shared, root, options.world_size
        self.modules, self.parameters = list(modules), list(parameters)
        self._elements = [shard_elements(p, self._world) for p in parameters]
        self._original = [dtypes[id(p)] for p in parameters]
        self._added = [id(p) in added for p in parameters]
        self._reshard = not root if reshard is None else bool(reshard)
        self._group = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else None
        self._dtypes = [shared.reduced_in[id(p)] for p in parameters]
        self._unreduced: list[torch.Tensor | None] = [None] * len(self.parameters)
        for i, (p, dtype) in enumerate(zip(self.parameters, self._dtypes, strict=True)):
            if dtype == p.dtype or not p.requires_grad:
                continue
            if autograd_sums_micro_batches():
                p.grad_dtype = dtype
            elif options.no_sync:
                self._unreduced[i] = torch.zeros_like(local_tensor(p.detach()), dtype=dtype)
        self._to_run = set[torch.nn.Module]()
        for module in modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)
        self.start()

    def start(self) -> None:
        self.state = "idle"
        self._to_run.clear()
        self.gathered: torch.Tensor | None = None
        self.forwards: list[int] = []
        self._unsharded: list[torch.Tensor] = []
        self._resharded: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.all_reduced: torch.Tensor | None = None

    def is_there(self) -> bool:
        """Whether its parameters are gathered."""
        return bool(self._unsharded) or not self.parameters

    # ---- hooks -------------------------------------------------------------------------------------

    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self._root:
            self._shared.start()
        dtype = self._shared.options.param_dtype
        if dtype is not None:
            args, kwargs = map_tensors(
                lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, (args, kwargs)
            )
        if not self._to_run:
            self._to_run.update(self.modules)
        if not self.parameters:
            return args, kwargs
        again = self.state == "forward"
        self.state = "forward"
        self.gather()
        self._wait()
        if again or not torch.is_grad_enabled():
            return args, kwargs
        differentiated = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if differentiated:
            passed: Any = _PostBackward.apply(self.post_backward, *differentiated)  # type: ignore[no-untyped-call]
            made = dict(zip(map(id, differentiated), passed, strict=True))
            args, kwargs = map_tensors(lambda t: made.get(id(t), t), (args, kwargs))
        return args, kwargs

    def post_forward(self, module: Any, args: Any, output: Any) -> Any:
        self._to_run.discard(module)
        if self._to_run:  # other modules of the unit have yet to run
            return output
        if self.parameters:
            if self._reshard:
                self._free()
            self.forwards.append(len(self._shared.order))
            self._shared.order.append(self)
        self.state = "idle"
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self.pre_backward)
        if self._root:
            self._shared.previous = None
        return output

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._shared.end_with_backward()
        if not self.parameters or self.state == "backward":
            return gradient
        self.state = "backward"
        self.gather()
        self._wait()
        self._keep_as_computed(True)
        if self.forwards:  # _backward_prefetch
            place = self.forwards.pop()
            if place > 0:
                self._shared.order[place - 1].gather()
        return gradient

    def post_backward(self) -> None:
        self.state = "after backward"
        with torch.no_grad():
            if self._shared.options.no_sync:
                self._accumulate()
            else:
                self._reduce()

    def _keep_as_computed(self, keep: bool) -> None:
        """``_set_unsharded_grad_dtypes``: while the backward of the unit runs, autograd adds gradients of
        smaller types to larger ones without a cast, and leaves new ones in their type."""
        if not autograd_sums_micro_batches():
            return
        for p, dtype in zip(self.parameters, self._dtypes, strict=True):
            if p.requires_grad and dtype.itemsize > p.dtype.itemsize and not is_whole_on_each_rank(p):
                if not keep and p.grad is not None and p.grad.dtype != dtype:
                    p.grad = p.grad.to(dtype)
                p.grad_dtype = None if keep else dtype

    # ---- buffers -----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device

    def _empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=self._device)

    def gather(self) -> None:
        """``unshard``: the all-gather, into a buffer of the shards of all parameters of all ranks."""
        if self.gathered is not None or self._unsharded or not self.parameters:
            return
        if self._world == 1:
            self.gathered = self._empty(0, torch.uint8)
            return
        pairs = list(zip(self.parameters, self._elements, strict=True))
        cast = [e for (p, e), was in zip(pairs, self._original, strict=True) if p.dtype != was]
        # Shards are cast into one buffer first; after the forward, those of a smaller group without a cast.
        parts = self._world // self._group if self._resharded and self._group else 1
        flat = self._empty(sum(cast) * parts, self.parameters[0].dtype) if cast else None
        nbytes = sum(e * p.element_size() for p, e in pairs) * self._world
        self.gathered = self._empty(nbytes, torch.uint8)
        if self._shared.copies:
            self._empty(nbytes, torch.uint8)
        del flat

    def _wait(self) -> None:
        """``wait_for_unshard``: parameters are copied out of the buffer. In the forward the buffer stays
        until the parameters of the next unit are copied out."""
        if self.gathered is None:
            return
        forward = self.state == "forward"
        if forward:
            self._shared.previous = None
        self._unsharded = [
            self._empty(elements * self._world, parameter.dtype)
            for parameter, elements in zip(self.parameters, self._elements, strict=True)
        ]
        self._resharded = []
        if forward:
            self._shared.previous = self.gathered
        self.gathered = None

    def _free(self) -> None:
        """``reshard`` after the forward."""
        if self._group is not None:
            self._resharded = [
                self._empty(buffer.numel() // self._group, buffer.dtype) for buffer in self._unsharded
            ]
        self._unsharded = []

    def _reduce(self) -> None:
        """The rest of ``post_backward``, and ``foreach_reduce``."""
        reduced = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        grads = []
        for i in reduced:
            grads.append(local_gradient(self.parameters[i]))
            self.parameters[i].grad = None
        self._keep_as_computed(False)
        self._unsharded = []
        if self._shared.reduced:
            self._shared.reduced.pop(0)
        if not reduced:
            return
        last = None if autograd_sums_micro_batches() else grads[-1]  # a variable of a loop in foreach_reduce
        reduce_dtype = self._dtypes[reduced[0]]
        shard = sum(self._elements[i] for i in reduced)
        whole = self._empty(shard * self._world, reduce_dtype)
        copy_for_reduction(grads, self._world, whole)
        grads.clear()
        output = self._empty(shard, reduce_dtype)
        if self._shared.copies and self._world > 1:
            torch.empty_like(whole)
        if self._shared.options.replicas > 1:
            self.all_reduced = output  # ``AllReduceState``, until the end of the backward
        original = self._original[reduced[0]]
        output = output.to(original)
        if not all(self._added[i] for i in reduced):
            self.gradients.append(output)
        self._shared.reduced.append(whole)
        del last

    def _accumulate(self) -> None:
        """``accumulate_unsharded_grad_if_needed``, and the excess of the last micro-batch's reduction."""
        for parameter, unreduced in zip(self.parameters, self._unreduced, strict=True):
            if unreduced is not None and parameter.grad is not None:
                unreduced.add_(local_tensor(parameter.grad))
                parameter.grad = None
        self._keep_as_computed(False)
        self._unsharded = []
        reduced = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        if reduced:
            shared, dtype = self._shared, self._dtypes[reduced[0]]
            sizes = [local_tensor(self.parameters[i]).numel() * dtype.itemsize for i in reduced]
            shared.excess.of_reduction(
                sizes,
                0 if autograd_sums_micro_batches() else sizes[-1],
                sum(self._elements[i] for i in reduced),
                dtype,
                self._original[reduced[0]],
                ranks=self._world,
                copies=shared.copies,
                kept=not all(self._added[i] for i in reduced),
                all_reduced=shared.options.replicas > 1,
                device=self._device,
            )


class _PostBackward(torch.autograd.Function):
    """``RegisterPostBackwardFunction``: calls a function when the gradients of some inputs are there."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.then = then
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.then()
        return (None, *gradients)


def shard_shape(tensor: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """The shape of the first rank's part of a parameter. It is the largest, and all are padded to it.

    ``fully_shard`` splits along the first dimension, as ``torch.chunk`` does; of a DTensor it splits the
    local part.

    Raises:
        ParallelError: The parameter has no dimensions.
    """
    if tensor.dim() == 0:
        raise ParallelError("a parameter is a scalar, and fully_shard shards none: give it one dimension")
    shape = local_tensor(tensor).shape
    return (-(-shape[0] // world_size), *shape[1:])


def shard_elements(tensor: torch.Tensor, world_size: int) -> int:
    """Elements of any rank's part of a parameter, padding included."""
    return math.prod(shard_shape(tensor, world_size))
