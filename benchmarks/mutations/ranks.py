"""Mutations that disable what is promised for data-parallel training."""

from benchmarks.mutations.loops import ABSENT_IS_ZERO, DROPS_GRADIENTS
from benchmarks.mutations.record import Change, Mutation

SPLITS_AT_BUCKETS = Change(
    "planner/_torch/dynamo.py", '    "optimize_ddp": False,\n', '    "optimize_ddp": True,\n'
)

RANKS = [
    Mutation(
        "ddp",
        "DistributedDataParallel: every rank trains by the plan, with the gradients that it has without.",
        "Dynamo splits graphs at the wrapper's buckets, after which no plan fits them.",
        (SPLITS_AT_BUCKETS,),
        ("tests/test_ddp.py::test_two_ranks[plain]",),
    ),
    Mutation(
        "ddp-unused-parameters",
        "DistributedDataParallel with find_unused_parameters=True.",
        "Outputs without a gradient count as outputs with a gradient of zeros.",
        (ABSENT_IS_ZERO,),
        ("tests/test_ddp.py::test_two_ranks[unused parameters]",),
    ),
    Mutation(
        "ddp-static-graph",
        "DistributedDataParallel with static_graph=True.",
        "Dynamo splits graphs at the wrapper's buckets, after which no plan fits them.",
        (SPLITS_AT_BUCKETS,),
        ("tests/test_ddp.py::test_two_ranks[static graph]",),
    ),
    Mutation(
        "ddp-no-sync",
        "DistributedDataParallel with no_sync(): gradients are accumulated on each rank, then averaged.",
        "A planned call drops the gradients that are there when it begins.",
        (DROPS_GRADIENTS,),
        ("tests/test_ddp.py::test_two_ranks[accumulating]",),
    ),
    Mutation(
        "ddp-order-of-gradients",
        "DistributedDataParallel fills its buckets in the order in which it would without a plan.",
        "Gradients arrive in whatever order the engine takes them from one node.",
        (
            Change(
                "planner/hooks/arrival_order.py",
                "            if given.is_leaf and given.requires_grad:\n",
                "            if False:\n",
            ),
        ),
        ("tests/test_arrival_order.py::test_gradients_arrive_in_eager_s_order[shared]",),
    ),
    Mutation(
        "ddp-other-plans",
        "Ranks with different plans are an error at the first forward.",
        "Ranks publish their plans, and compare nothing.",
        (
            Change(
                "planner/runtime/ddp.py",
                "            if digests[rank] != digest:\n",
                "            if not digests[rank]:\n",
            ),
        ),
        ("tests/test_ddp.py::test_two_ranks[other plans]",),
    ),
    Mutation(
        "ddp-plans-that-hand-out-gradients-otherwise",
        "Ranks whose plans hand out other gradients, or take other graphs next, count as different.",
        "How graphs are to be traced is not compared.",
        (
            Change(
                "planner/runtime/ddp.py",
                '        "specs": [GraphSpec.of(graph).digest for graph in plan.graphs],\n',
                "",
            ),
        ),
        ("tests/test_ranks.py::test_ranks_that_run_differently_have_other_digests[per_use_inputs]",),
    ),
]
