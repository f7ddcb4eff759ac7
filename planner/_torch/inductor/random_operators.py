"""Random operators that Inductor runs in the order in which they are written, or from a saved state.

Inductor orders calls by what they read of each other. Those that draw from one generator read nothing of
each other, and Inductor may draw in another order (https://github.com/pytorch/pytorch/issues/192635). So each
takes a *token*, an empty tensor, and returns the token for the next draw. A draw that runs again starts from
the state that its first run saw, and puts the generator back: it needs no place in that order.

For each random operator that is asked for, another one is defined, whose schema has the token, or the state,
before the same arguments.
"""

import functools
import re
from collections.abc import Callable
from keyword import iskeyword
from typing import Any

import torch

from planner._torch.operators import OpOverload
from planner.errors import CaptureError

_library = torch.library.Library("planner_random", "DEF")

FROM_STATE: dict[Any, Any] = {}
"""For each operator that takes a state, the operator that it runs. Meanwhile it also holds the generator's
present state, to put it back."""

IN_ORDER: dict[Any, Any] = {}
"""For each operator that takes a token, the operator, or the function that reads a state, that it runs."""

_TOKEN = "planner_token"
"""The name of the argument, which no operator of PyTorch has."""
_STATE = "planner_state"
"""The same for a state."""


def first_token() -> torch.Tensor:
    """The token for the first draw of a program."""
    return torch.empty(0)


@functools.cache
def in_order(operator: Any) -> Any:
    """The operator that takes a token, then what ``operator`` takes; it returns the results, then a token.

    Args:
        operator: A random operator that writes to none of its arguments.

    Raises:
        CaptureError: It is no operator, or writes to an argument.
    """

    def draw(token: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (*_as_tuple(operator(*args, **kwargs)), token.new_empty(0))

    ordered = _extended(operator, "in_order", _TOKEN, draw, returns_token=True)
    IN_ORDER[ordered] = operator
    return ordered


@functools.cache
def from_state(operator: Any, run: Callable[..., Any], devices: str, device_index: int | None) -> Any:
    """The operator that takes a generator's state, then what ``operator`` takes, and runs from that state.

    Args:
        operator: As for :func:`in_order`.
        run: Runs an operator from a state, on the generators of ``devices`` and ``device_index``.
        devices: The kinds of device whose generators these are, as in ``cpu+cuda``.
        device_index: The index of the GPU; None for the current one, or for none.

    Raises:
        CaptureError: As for :func:`in_order`.
    """

    def draw(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = run(state, devices, device_index, operator, *args, **kwargs)
        return _as_tuple(results) if len(operator._schema.returns) > 1 else results

    def without_data(_state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    where = f"{devices}_{device_index}".replace("+", "_")
    again = _extended(operator, f"from_state_{where}", _STATE, draw, without_data)
    FROM_STATE[again] = operator
    return again


@functools.cache
def saved_state(read: Callable[..., torch.Tensor], size: int, devices: str, device_index: int | None) -> Any:
    """The operator that takes a token and returns the state of the generators, and a token.

    Args:
        read: Reads the state of the generators of ``devices`` and ``device_index``.
        size: The bytes of that state.
        devices, device_index: As for :func:`from_state`.
    """

    def state(token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return read(devices, device_index), token.new_empty(0)

    def without_data(token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token.new_empty(size, dtype=torch.uint8, device="cpu"), token.new_empty(0)

    name = f"state_{devices}_{device_index}".replace("+", "_")
    reader = _defined(f"{name}(Tensor {_TOKEN}) -> (Tensor, Tensor)", state, without_data)
    IN_ORDER[reader] = read
    return reader


def _extended(
    operator: Any,
    kind: str,
    first: str,
    function: Callable[..., Any],
    without_data: Callable[..., Any] | None = None,
    *,
    returns_token: bool = False,
) -> Any:
    """Define an operator whose schema has one more argument than another's, and may return a token.

    Args:
        operator: The other operator.
        kind: The end of the new operator's name.
        first: The name of its first argument.
        function: What it runs.
        without_data: What it runs on tensors without data; None: the same.
        returns_token: Whether it returns a token after the results.

    Raises:
        CaptureError: The other is no operator, or writes to an argument.
    """
    if not isinstance(operator, OpOverload) or operator._schema.is_mutable:
        raise CaptureError(
            f"{operator} draws random numbers in a form that backend='inductor' cannot run; plan with "
            "backend='eager'"
        )
    schema = str(operator._schema)
    name, _, rest = schema.partition("(")
    arguments, _, _ = rest.rpartition(") -> ")
    # torch.fx finds no signature if an argument is named by a keyword, as `from` of `uniform`: it gets a "_".
    arguments = re.sub(r"(?<= )\w+(?=[=,]|$)", lambda n: f"{n[0]}_" * iskeyword(n[0]) or n[0], arguments)
    returns = [str(r.type) for r in operator._schema.returns] + ["Tensor"] * returns_token
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    prefix = name.replace("::", "_").replace(".", "_")
    taken = f"Tensor {first}" + (f", {arguments}" if arguments else "")
    return _defined(f"{prefix}_{kind}({taken}) -> {result}", function, without_data or function)


def _defined(schema: str, function: Callable[..., Any], without_data: Callable[..., Any]) -> Any:
    name = _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planner_random::{name}", without_data, lib=_library)
    return getattr(torch.ops.planner_random, name).default


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, list | tuple) else (results,)
