"""Modules of random operations: views, writes in place, breaks, results that nothing differentiates.

A module follows from a seed. Its forward is compiled from text, so that Dynamo sees code as users write it.
"""

import linecache
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

from tests.random_operations import OPERATIONS, SHAPES, Kind, Shape


@dataclass
class _Forward:
    kind: Kind
    draws: random.Random
    values: list[tuple[str, Shape]] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add_operation(self) -> None:
        name, shape = self._value(self.values)
        fitting = [operation for operation in OPERATIONS[self.kind] if operation.fits(shape)]
        (operation,) = self.draws.choices(fitting, [o.weight for o in fitting])
        other, _ = self._value([value for value in self.values if value[1] == shape])
        shapes = operation.results(shape)
        names = [f"v{len(self.values) + i}" for i in range(len(shapes))]
        total = 1
        for size in shape[:-1]:
            total *= size
        text = operation.text.format(
            x=name,
            y=other,
            m="" if operation.module is None else self._module(operation.module(shape)),
            **dict(zip("ab", names, strict=False)),
            c=shape[-1],
            h=shape[-1] // 2,
            n=total,
            shape=shape,
        )
        self.lines.append(text if "{a}" in operation.text else f"{names[0]} = {text}")
        self.values += zip(names, shapes, strict=True)

    def _value(self, among: Sequence[tuple[str, Shape]]) -> tuple[str, Shape]:
        return self.draws.choice(among[-3:] if self.draws.random() < 0.6 else among)

    def _module(self, made_by: str) -> str:
        again = [name for name, text in self.modules.items() if text == made_by]
        if again and self.draws.random() < 0.2:
            return self.draws.choice(again)
        name = f"m{len(self.modules)}"
        self.modules[name] = made_by
        return name


def random_module(seed: int, kind: Kind) -> tuple[nn.Module, str]:
    """A module that returns several of its last results, in training mode, and its code.

    Args:
        seed: The seed of all random choices.
        kind: What it computes with; :data:`SHAPES` has the shape of its input.
    """
    draws = random.Random(seed)
    breaks = draws.choice([0.0, 0.1, 0.3])
    forward = _Forward(kind, draws, [("x", SHAPES[kind])])
    for _ in range(draws.choice([6, 12, 24])):
        forward.add_operation()
        if draws.random() < breaks:
            forward.lines.append("torch._dynamo.graph_break()")
    last = forward.values[-4:]
    returned = ", ".join(name for name, _ in draws.sample(last, draws.randint(1, len(last))))
    made = [f"self.{name} = {text}" for name, text in forward.modules.items()]
    code = _function("build", "self", [*made, "return self"])
    code += _function("forward", "self, x", [*forward.lines, f"return ({returned},)"])
    filename = f"<random module {kind} {seed}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
    exec(compile(code, filename, "exec"), scope)
    torch.manual_seed(seed)
    made_of = type("RandomModule", (nn.Module,), {"forward": scope["forward"]})
    return scope["build"](made_of()).train(), code


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    return f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
