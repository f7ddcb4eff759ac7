"""Training graphs for the tests of the solvers: chains, transformer-like graphs, random DAGs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from solvers import GLUE_REGION, Graph, Op, Phase, Value


@dataclass(frozen=True)
class Forward:
    """A forward operation from which :func:`training_graph` derives its backward.

    Attributes:
        inputs: Indices of forward operations whose first output it reads.
        sizes: Bytes of its outputs.
        seconds: Its duration; its backward takes twice as long.
        workspace: Its workspace bytes, forward and backward.
        saves_inputs: Whether its backward reads its inputs.
        saves_output: Whether its backward reads its first output.
        random: Whether it draws random numbers (and so has a replay row and a saved state).
        statistics: Whether it makes a second output that its replay row does not make.
        recomputable: Whether it may be re-run.
        region: The captured graph it belongs to.
    """

    inputs: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float = 1.0
    workspace: int = 0
    saves_inputs: bool = True
    saves_output: bool = False
    random: bool = False
    statistics: bool = False
    recomputable: bool = True
    region: int = 0


def training_graph(forward: Sequence[Forward], *, parameter_bytes: int = 0) -> Graph:
    """Forward operations and the backward that autograd would run: reversed, gradients of values
    with several readers accumulated, gradients of parameters held to the end."""
    values: list[Value] = []
    ops: list[Op] = []
    replays: list[tuple[int, Op]] = []
    first: list[int] = []

    def new(size: int, name: str, **options: object) -> int:
        values.append(Value(size, name, **options))  # type: ignore[arg-type]
        return len(values) - 1

    for i, f in enumerate(forward):
        inputs = tuple(first[j] for j in f.inputs)
        outputs = tuple(new(size, f"v{i}.{k}") for k, size in enumerate(f.sizes))
        first.append(outputs[0])
        op = Op(
            inputs, outputs, f.seconds, f.workspace, Phase.FORWARD, f.recomputable, f.region, None, f"f{i}"
        )
        if f.random:
            state = new(50, f"state{i}", on_demand=True)
            replays.append((i, replace(op, inputs=(*inputs, state), name=f"f{i} replayed")))
            op = replace(op, outputs=(*outputs, state))
        elif f.statistics:
            replays.append((i, replace(op, name=f"f{i} replayed")))
            op = replace(op, outputs=(*outputs, new(7, f"statistic{i}", held_until=len(forward) - 1)))
        ops.append(op)

    held: list[int] = []
    partial: list[list[int]] = [[] for _ in forward]
    for i in reversed(range(len(forward))):
        f = forward[i]
        while len(partial[i]) > 1:
            pair = (partial[i].pop(), partial[i].pop())
            total = new(f.sizes[0], f"g{i}")
            ops.append(Op(pair, (total,), 0.1, 0, Phase.BACKWARD, region=f.region, name=f"add{i}"))
            partial[i].append(total)
        reads = list(partial[i])
        reads += [first[j] for j in f.inputs] if f.saves_inputs else []
        reads += [first[i]] if f.saves_output else []
        reads += ops[i].outputs[1 : len(f.sizes)]
        outputs_ = []
        for j in f.inputs:
            outputs_.append(new(forward[j].sizes[0], f"g{j} from {i}"))
            partial[j].append(outputs_[-1])
        if parameter_bytes:
            held.append(new(parameter_bytes, f"parameter gradient {i}"))
            outputs_.append(held[-1])
        if outputs_:
            distinct = tuple(dict.fromkeys(reads))
            ops.append(
                Op(
                    distinct,
                    tuple(outputs_),
                    2 * f.seconds,
                    f.workspace,
                    Phase.BACKWARD,
                    region=f.region,
                    name=f"b{i}",
                )
            )
    base = len(ops)
    for v in held:
        values[v] = values[v]._replace(held_until=base - 1)
    for n, (i, row) in enumerate(replays):
        ops[i] = replace(ops[i], replay=base + n)
        ops.append(row)
    return Graph(tuple(ops), tuple(values), base)


def chain(length: int, size: int = 100, *, seconds: float = 1.0, parameter_bytes: int = 0) -> Graph:
    """Equal layers in a row, each reading its input in backward."""
    layers = [Forward((i - 1,) if i else (), (size,), seconds) for i in range(length)]
    return training_graph(layers, parameter_bytes=parameter_bytes)


def transformer(layers: int, width: int = 64, *, dropout: bool = True) -> Graph:
    """Blocks of a norm, wide projections, a square score matrix, dropout and two residual sums."""
    ops = [Forward((), (width,), 0.1)]
    for _ in range(layers):
        x = len(ops) - 1
        ops += [
            Forward((x,), (width, 2), 0.1),  # norm, with its statistics
            Forward((x + 1,), (3 * width,), 3.0),
            Forward((x + 2,), (4 * width,), 1.0, width),
            Forward((x + 3,), (4 * width,), 0.3, saves_inputs=False, saves_output=True),
            Forward((x + 4,), (4 * width, width), 0.4, saves_inputs=False, random=dropout),
            Forward((x + 5, x + 2), (width,), 1.0),
            Forward((x + 6,), (width,), 1.0),
            Forward((x, x + 7), (width,), 0.1, saves_inputs=False),
            Forward((x + 8,), (width, 2), 0.1),
            Forward((x + 9,), (4 * width,), 4.0),
            Forward((x + 10,), (4 * width,), 0.4),
            Forward((x + 11,), (width,), 4.0),
            Forward((x + 8, x + 12), (width,), 0.1, saves_inputs=False),
        ]
    ops.append(Forward((len(ops) - 1,), (4,), 0.5))
    return training_graph(ops, parameter_bytes=8)


def unet(depth: int, size: int = 4096) -> Graph:
    """Long skips over the whole depth: hardly an articulation point."""
    ops = [Forward((), (size,))]
    skips = []
    for level in range(depth):
        ops.append(Forward((len(ops) - 1,), (size >> level,), 2.0, size >> level, statistics=True))
        skips.append(len(ops) - 1)
        ops.append(Forward((len(ops) - 1,), (size >> (level + 1),), 0.2))
    for level in reversed(range(depth)):
        ops.append(Forward((len(ops) - 1, skips.pop()), (size >> level,), 2.0, size >> level))
        ops.append(Forward((len(ops) - 1,), (size >> level,), 0.1, saves_inputs=False, saves_output=True))
    return training_graph(ops)


def random_dag(seed: int, length: int, *, regions: int = 1, plain: bool = False, reach: int = 6) -> Graph:
    """A random training graph; unless ``plain``, with every feature of the solvers' graphs.

    Args:
        seed: The generator's.
        length: Number of forward operations.
        regions: Captured graphs; between two of them runs a glue operation.
        plain: Only single-output operations that may all be re-run, and no workspace.
        reach: How far back an operation reads, as a rule.
    """
    rng = random.Random(seed)
    ops: list[Forward] = []
    for i in range(length):
        near = range(max(0, i - reach), i)
        inputs = set(rng.sample(near, min(len(near), rng.choice((1, 1, 1, 2)))))
        if i and rng.random() < 0.1:
            inputs.add(rng.randrange(i))
        sizes = [rng.choice((1, 10, 40, 100, 100, 200))]
        if not plain and rng.random() < 0.2:
            sizes.append(rng.choice((1, 30)))
        region = i * regions // length
        glue = regions > 1 and region != (i + 1) * regions // length and i + 1 < length
        kind = "plain" if plain or glue else rng.choice(("plain",) * 6 + ("random", "statistics", "fixed"))
        ops.append(
            Forward(
                tuple(sorted(inputs)),
                tuple(sizes),
                rng.choice((0.1, 1.0, 1.0, 5.0)),
                0 if plain or rng.random() < 0.7 else rng.choice((20, 60)),
                saves_inputs=rng.random() < 0.7,
                saves_output=rng.random() < 0.4,
                random=kind == "random",
                statistics=kind == "statistics",
                recomputable=not glue and kind != "fixed",
                region=GLUE_REGION if glue else region,
            )
        )
    return training_graph(ops, parameter_bytes=0 if plain else rng.choice((0, 5)))


def graphs(*, most: int = 40, regions: int = 2, plain: bool = False) -> st.SearchStrategy[Graph]:
    """Random training graphs of all kinds, as a hypothesis strategy."""
    return st.builds(
        random_dag,
        seed=st.integers(0, 2**20),
        length=st.integers(1, most),
        regions=st.integers(1, regions),
        plain=st.just(True) if plain else st.booleans(),
        reach=st.integers(1, 8),
    )
