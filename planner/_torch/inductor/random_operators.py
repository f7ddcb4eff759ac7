"""Random operators for Inductor: in the order in which they are written, or from a saved generator state.

Inductor orders calls by what they read of each other. Those that draw from one generator read nothing of
each other, and Inductor may draw in another order (https://github.com/pytorch/pytorch/issues/192635). So each
takes a *token*, an empty tensor, and returns the next draw's. A draw that runs again starts from the state
that its first run saw, and puts the generator back: it needs no place in that order.

An operator is defined for each that is asked for, with its schema and the token, or the state, before its
arguments. Seen to work with torch 2.13.
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

PLAIN: dict[Any, Any] = {}
"""By an operator that takes a state: the operator that it runs, which allocates the state once more."""

IN_ORDER: dict[Any, Any] = {}
"""By an operator that takes a token: the operator, or the function that reads a state, that it runs."""

_TOKEN = "planner_token"
_STATE = "planner_state"


def first_token() -> torch.Tensor:
    """What the first draw of a program takes."""
    return torch.empty(0)


@functools.cache
def in_order(operator: Any) -> Any:
    """The operator that takes a token, then what ``operator`` takes; it returns the results, then a token.

    Args:
        operator: A random operator that writes to none of its arguments.

    Raises:
        CaptureError: Its schema cannot be extended.
    """

    def draw(token: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (*_results(operator(*args, **kwargs)), token.new_empty(0))

    drawn = _define(operator, "in_order", _TOKEN, draw, returns_token=True)
    IN_ORDER[drawn] = operator
    return drawn


@functools.cache
def from_state(operator: Any, run: Callable[..., Any], devices: str, device_index: int | None) -> Any:
    """The operator that takes a generator's state, then what ``operator`` takes, and runs from that state.

    Args:
        operator: As for :func:`in_order`.
        run: Runs an operator from a state, on the generators of ``devices`` and ``device_index``.
        devices, device_index: Whose generators.
    """

    def draw(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = run(state, devices, device_index, operator, *args, **kwargs)
        return tuple(_results(results)) if len(operator._schema.returns) > 1 else results

    def without_data(_state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    where = f"{devices}_{device_index}".replace("+", "_")
    again = _define(operator, f"from_state_{where}", _STATE, draw, without_data)
    PLAIN[again] = operator
    return again


@functools.cache
def saved_state(read: Callable[..., torch.Tensor], size: int, devices: str, device_index: int | None) -> Any:
    """The operator that takes a token and returns the state of the generators, and a token.

    Args:
        read: Reads the state of the generators of ``devices`` and ``device_index``.
        size: Its bytes.
        devices, device_index: Whose generators.
    """

    def state(token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return read(devices, device_index), token.new_empty(0)

    def without_data(token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token.new_empty(size, dtype=torch.uint8, device="cpu"), token.new_empty(0)

    name = f"state_{devices}_{device_index}".replace("+", "_")
    reader = _defined(f"{name}(Tensor {_TOKEN}) -> (Tensor, Tensor)", state, without_data)
    IN_ORDER[reader] = read
    return reader


def _define(
    operator: Any,
    kind: str,
    first: str,
    function: Callable[..., Any],
    without_data: Callable[..., Any] | None = None,
    *,
    returns_token: bool = False,
) -> Any:
    if not isinstance(operator, OpOverload) or operator._schema.is_mutable:
        raise CaptureError(
            f"{operator} draws random numbers in a form that backend='inductor' cannot run; plan with "
            "backend='eager'"
        )
    schema = str(operator._schema)
    name, _, rest = schema.partition("(")
    arguments, _, _ = rest.rpartition(") -> ")
    # torch.fx knows no signature where the name of an argument is a word of Python's, as `from` of `uniform`.
    arguments = re.sub(r"(?<= )\w+(?=[=,]|$)", lambda n: f"{n[0]}_" * iskeyword(n[0]) or n[0], arguments)
    returns = [str(r.type) for r in operator._schema.returns] + ["Tensor"] * returns_token
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    plain = name.replace("::", "_").replace(".", "_")
    taken = f"Tensor {first}" + (f", {arguments}" if arguments else "")
    return _defined(f"{plain}_{kind}({taken}) -> {result}", function, without_data or function)


def _defined(schema: str, function: Callable[..., Any], without_data: Callable[..., Any]) -> Any:
    name = _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planner_random::{name}", without_data, lib=_library)
    return getattr(torch.ops.planner_random, name).default


def _results(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, list | tuple) else (results,)
