"""Modules of random operations: views, writes in place, breaks, results that nothing differentiates.

A module follows from a seed. Its forward is compiled from text, so that Dynamo sees code as users write it.
"""

import linecache
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

Shape = tuple[int, ...]
Kind = Literal["sequences", "images"]
SHAPES: dict[Kind, Shape] = {"sequences": (4, 48, 64), "images": (2, 8, 16, 16)}
"""Of the input of a module of each kind."""


def _same(shape: Shape) -> list[Shape]:
    return [shape]


@dataclass(frozen=True)
class Operation:
    """Something that a forward does.

    Attributes:
        text: What is written: ``{x}`` is a value, ``{y}`` another of the same shape, ``{m}`` a submodule or
            parameter; ``{a}`` and ``{b}`` are results, of which there else is one, in front of the text;
            ``{shape}`` is the shape of ``{x}``, ``{c}`` and ``{h}`` its last size and half of that, and
            ``{n}`` the other sizes taken together.
        module: What makes ``{m}``, of which some are used again.
        results: Shapes of the results.
        fits: Whether it can be done with a value of a shape.
        weight: How often it is done.
    """

    text: str
    module: Callable[[Shape], str] | None = None
    results: Callable[[Shape], list[Shape]] = _same
    fits: Callable[[Shape], bool] = lambda shape: True
    weight: float = 1.0


def _three(shape: Shape) -> bool:
    return len(shape) == 3


def _even(shape: Shape) -> bool:
    return shape[-1] % 2 == 0 and shape[-1] > 8


def _halves(shape: Shape) -> list[Shape]:
    return [(*shape[:-1], shape[-1] // 2)] * 2


def _turned(shape: Shape) -> list[Shape]:
    return [(*shape[:-2], shape[-1], shape[-2])]


def _alike(*texts: str, weight: float = 1.0) -> list[Operation]:
    return [Operation(text, weight=weight / len(texts)) for text in texts]


_ANYWHERE = [
    *_alike(
        *("torch.tanh({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.relu({x})", "F.silu({x})", "{x}.abs()"),
        *("{x}.neg()", "{x} * 0.5", "{x} / 3", "{x} + 1", "{x}.square() * 0.1", "F.hardswish({x})"),
        *("torch.exp({x}.clamp(max=1))", "F.leaky_relu({x}, 0.1)", "F.softplus({x})", "{x}.clone()"),
        weight=5.0,
    ),
    *_alike(
        *(
            "{x} + {y}",
            "{x} * {y}",
            "{x} - 0.5 * {y}",
            "torch.maximum({x}, {y})",
            "torch.lerp({x}, {y}, 0.3)",
        ),
        *("torch.where({x} > 0, {x}, {y} * 0.1)", "torch.stack([{x}, {y}]).mean(0)"),
        weight=4.0,
    ),
    *_alike(
        *("{a} = {x} * 1.5; {a}.add_(1)", "{a} = {x} * 1.5; {a}.tanh_()", "{a} = {x}.clone(); {a}.mul_(0.5)"),
        *("{a} = {x} + 0.5; F.relu({a}, inplace=True)", "{a} = {x} * 1.1; {a}[..., :{h}].mul_(2)"),
        "{a} = torch.zeros({shape}); {a}.copy_({x})",
        weight=3.0,
    ),
    *_alike(
        *("{x} + {x}.detach() * 0.1", "{x} - {x}.detach().mean(-1, keepdim=True)"),
        "{x} * {x}.mean(-1, keepdim=True).expand({x}.shape)",
        weight=2.0,
    ),
    Operation("F.dropout({x}, 0.2, self.training)"),
    Operation("{x} / ({x}.detach().abs().max().item() + 1)"),
    Operation("{x} * (1.0 if {x}.detach().sum().item() > 0 else 0.5)", weight=0.5),
    Operation("{a}, {b} = {x}.chunk(2, -1)", results=_halves, fits=_even, weight=1.5),
    Operation("{a}, {b} = {x}.unflatten(-1, (2, -1)).unbind(-2)", results=_halves, fits=_even, weight=0.5),
    Operation("{x}[..., {h}:]", results=lambda s: _halves(s)[:1], fits=_even),
]

_SEQUENCES = [
    *_ANYWHERE,
    Operation(
        "self.{m}({x})",
        lambda s: f"nn.Linear({s[-1]}, 64)",
        lambda s: [(*s[:-1], 64)],
        weight=3.0,
    ),
    Operation("self.{m}({x})", lambda s: f"nn.Linear({s[-1]}, {s[-1]}, bias=False)"),
    Operation("self.{m}({x})", lambda s: f"nn.LayerNorm({s[-1]})"),
    Operation("self.{m}({x})", lambda s: f"nn.BatchNorm1d({s[1]})"),
    Operation("self.{m}({x})", lambda s: f"nn.Conv1d({s[1]}, {s[1]}, 3, padding=1)", fits=_three),
    Operation(
        "self.{m}({x})[0]",
        lambda s: f"nn.GRU({s[-1]}, 32, batch_first=True)",
        lambda s: [(*s[:-1], 32)],
        _three,
        0.5,
    ),
    Operation("{x} * self.{m}", lambda s: f"nn.Parameter(torch.randn({s[-1]}))"),
    Operation("{x} + self.{m}", lambda s: f"nn.Parameter(torch.randn({s[-1]}))"),
    Operation(
        "torch.utils.checkpoint.checkpoint(self.{m}, {x}, use_reentrant=False)",
        lambda s: f"nn.Sequential(nn.Linear({s[-1]}, 64), nn.Dropout(0.1), nn.Linear(64, {s[-1]}))",
    ),
    Operation("F.softmax({x}, -1)"),
    Operation("{x}.cumsum(1) * 0.05"),
    Operation("{x}.transpose(1, 2)", results=_turned, fits=_three, weight=1.5),
    Operation("{x}.transpose(1, 2).contiguous()", results=_turned, fits=_three),
    Operation("{x}.permute(1, 0, 2)", results=lambda s: [(s[1], s[0], s[2])], fits=_three),
    Operation("{x}.reshape({n}, {c})", results=lambda s: [(s[0] * s[1], s[2])], fits=_three),
    Operation("{x}.unsqueeze(1).squeeze(1)", fits=_three),
    Operation(
        "torch.cat([{x}, {y}], -1)", results=lambda s: [(*s[:-1], 2 * s[-1])], fits=lambda s: s[-1] < 128
    ),
    Operation("torch.bmm({x}, {y}.transpose(1, 2)) * 0.1", results=lambda s: [(*s[:-1], s[1])], fits=_three),
    Operation("F.scaled_dot_product_attention({x}, {y}, {x}, dropout_p=0.1)", fits=_three),
    Operation("F.scaled_dot_product_attention({x}, {x}, {y}, is_causal=True)", fits=_three),
    Operation("{x}[torch.arange(len({x})).flip(0)]", weight=0.5),
]


def _smaller(shape: Shape) -> list[Shape]:
    return [(*shape[:2], shape[2] // 2, shape[3] // 2)]


def _larger(shape: Shape) -> list[Shape]:
    return [(*shape[:2], shape[2] * 2, shape[3] * 2)]


def _can_shrink(shape: Shape) -> bool:
    return min(shape[2:]) >= 4


def _can_grow(shape: Shape) -> bool:
    return max(shape[2:]) <= 16


_IMAGES = [
    *_ANYWHERE,
    Operation(
        "self.{m}({x})",
        lambda s: f"nn.Conv2d({s[1]}, 16, 3, padding=1)",
        lambda s: [(s[0], 16, *s[2:])],
        weight=3.0,
    ),
    Operation("self.{m}({x})", lambda s: f"nn.Conv2d({s[1]}, {s[1]}, 1, bias=False)"),
    Operation("self.{m}({x})", lambda s: f"nn.Conv2d({s[1]}, {s[1]}, 3, padding=1, groups={s[1]})"),
    Operation(
        "self.{m}({x})",
        lambda s: f"nn.ConvTranspose2d({s[1]}, {s[1]}, 2, stride=2)",
        _larger,
        _can_grow,
        0.5,
    ),
    Operation("self.{m}({x})", lambda s: f"nn.BatchNorm2d({s[1]})", weight=3.0),
    Operation("self.{m}({x})", lambda s: f"nn.GroupNorm(4, {s[1]})"),
    Operation("self.{m}({x})", lambda s: f"nn.PReLU({s[1]})", weight=0.5),
    Operation(
        "self.{m}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)", lambda s: f"nn.LayerNorm({s[1]})", weight=0.5
    ),
    Operation("{x} * self.{m}", lambda s: f"nn.Parameter(torch.randn({s[1]}, 1, 1))"),
    Operation(
        "torch.utils.checkpoint.checkpoint(self.{m}, {x}, use_reentrant=False)",
        lambda s: f"nn.Sequential(nn.Conv2d({s[1]}, {s[1]}, 3, padding=1), nn.SiLU(), nn.Dropout(0.1))",
    ),
    *[
        Operation(text, results=_smaller, fits=_can_shrink, weight=0.5)
        for text in ("F.max_pool2d({x}, 2)", "F.avg_pool2d({x}, 2)")
    ],
    *[
        Operation(f"F.interpolate({{x}}, scale_factor=2, mode={mode!r})", None, _larger, _can_grow, 0.3)
        for mode in ("nearest", "bilinear", "bicubic")
    ],
    Operation("{x}.transpose(2, 3)", results=_turned),
    Operation("{x}.contiguous(memory_format=torch.channels_last)"),
    Operation("{x} - {x}.mean((2, 3), keepdim=True)"),
    Operation("{x} * {x}.amax((2, 3), keepdim=True)", weight=0.5),
    Operation("F.pad({x}, (1, 1, 1, 1), mode='replicate')[:, :, 1:-1, 1:-1]", weight=0.5),
    Operation("torch.cat([{x}, {y}], 1)", None, lambda s: [(s[0], 2 * s[1], *s[2:])], lambda s: s[1] < 32),
]
_OPERATIONS: dict[Kind, list[Operation]] = {"sequences": _SEQUENCES, "images": _IMAGES}


@dataclass
class _Forward:
    kind: Kind
    draws: random.Random
    values: list[tuple[str, Shape]] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def do_something(self) -> None:
        name, shape = self._value(self.values)
        fitting = [operation for operation in _OPERATIONS[self.kind] if operation.fits(shape)]
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
        seed: What is random follows from it.
        kind: What it computes with; for the shape of its input see :data:`SHAPES`.
    """
    draws = random.Random(seed)
    breaks = draws.choice([0.0, 0.1, 0.3])
    forward = _Forward(kind, draws, [("x", SHAPES[kind])])
    for _ in range(draws.choice([6, 12, 24])):
        forward.do_something()
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
