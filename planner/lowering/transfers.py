"""The calls by which emitted graphs send results to the host and fetch them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from planner._torch import fake
from planner._torch.execution.host_place import HostPlace
from planner.errors import CaptureError
from planner.graph.dying_operands import writing
from planner.graph.joint_graph import JointGraph, JointOp
from planner.graph.replay.packed import PACKED, is_packable
from planner.graph.sent import sent_node


def node_to_send(joint: JointGraph, op: JointOp) -> Node:
    """The node whose tensor is kept on the host, of an operation with a result that a plan keeps there.

    Raises:
        CaptureError: It cannot be kept there.
    """
    node = sent_node(joint, op)
    if node is None:
        raise CaptureError(
            f"the plan keeps the result of {op.name} on the host, where it cannot be: plan again"
        )
    return node


def begin_to_send(
    graph: FxGraph, host: HostPlace, sent: Node, take: Callable[[Node], Node]
) -> tuple[Node, Node]:
    """Emit the call that begins to send a result, a mask as bits.

    Returns:
        The copy, which is not complete, and what is sent.
    """
    value = take(sent)
    if is_packable(sent):
        value = PACKED.save_state(graph, value)
    return on_host(graph, host.send, value), value


def on_host(graph: FxGraph, function: Callable[..., Any], *args: Node) -> Node:
    """Emit a call whose result takes none of the device's memory."""
    kept = graph.call_function(function, args)
    kept.meta["val"] = torch.empty(0, dtype=torch.uint8)
    return kept


def check_transfers(graph: FxGraph, host: HostPlace) -> None:
    """See that nothing is read before it is fetched, and nothing freed, or written over, before it is sent.

    Raises:
        AssertionError: The graph does one of these.
    """
    being_sent: dict[Node, object] = {}
    for node in graph.nodes:
        if node.target == host.send:
            (value,) = node.args
            assert [(user.target, user.args) for user in node.users] == [(host.sent, (node, value))], node
            being_sent[node] = fake.storage_key(value.meta["val"])
        elif node.target == host.sent:
            del being_sent[node.args[0]]
        elif node.target == host.fetch:
            assert [user.target == host.fetched for user in node.users] == [True], node
        elif node.op == "call_function" and (into := writing(node)) is not None:
            written = into.operand(node).meta["val"]
            assert fake.storage_key(written) not in being_sent.values(), node
    assert not being_sent, being_sent
