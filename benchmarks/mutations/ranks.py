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
        ("tests/distributed/test_ddp.py::test_two_ranks[plain]",),
    ),
    Mutation(
        "ddp-step-inside",
        "A planned step of a model in DistributedDataParallel runs inside of the wrapper's forward.",
        "It runs beside the wrapper, which then reduces nothing.",
        (
            Change(
                "planner/lazy/step.py",
                "return call_inside(models, run, data, named)",
                "return run(*data, **named)",
            ),
        ),
        ("tests/lazy/test_wrapped.py::test_a_step_runs_inside_of_the_wrappers_forward",),
    ),
    Mutation(
        "ddp-unused-parameters",
        "DistributedDataParallel with find_unused_parameters=True.",
        "Outputs without a gradient count as outputs with a gradient of zeros.",
        (ABSENT_IS_ZERO,),
        ("tests/distributed/test_ddp.py::test_two_ranks[unused parameters]",),
    ),
    Mutation(
        "ddp-static-graph",
        "DistributedDataParallel with static_graph=True.",
        "Dynamo splits graphs at the wrapper's buckets, after which no plan fits them.",
        (SPLITS_AT_BUCKETS,),
        ("tests/distributed/test_ddp.py::test_two_ranks[static graph]",),
    ),
    Mutation(
        "ddp-no-sync",
        "DistributedDataParallel with no_sync(): gradients are accumulated on each rank, then averaged.",
        "A planned call drops the gradients that are there when it begins.",
        (DROPS_GRADIENTS,),
        ("tests/distributed/test_ddp.py::test_two_ranks[accumulating]",),
    ),
    Mutation(
        "ddp-order-of-gradients",
        "DistributedDataParallel fills its buckets in the order in which it would without a plan.",
        "Gradients arrive in whatever order the engine takes them from one node.",
        (
            Change(
                "planner/hooks/arrival_order.py",
                "given.is_leaf and given.requires_grad and (ranks or ",
                "False and (ranks or ",
            ),
        ),
        ("tests/hooks/test_arrival_order.py::test_gradients_arrive_in_eager_s_order[shared]",),
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
        ("tests/distributed/test_ddp.py::test_two_ranks[other plans]",),
    ),
    Mutation(
        "replay-units",
        "What a replayed plan makes again under fully_shard is made while its unit is gathered.",
        "All units are one region, in which any call runs again before any node's.",
        (
            Change(
                "planner/replay/problem.py",
                "pending, freed, Region(unit))",
                "pending, freed, Region(ROOT))",
            ),
        ),
        ("tests/replay/test_replayed.py::test_units_of_fully_shard_are_regions[None]",),
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
        (
            "tests/distributed/test_ranks.py::test_ranks_that_run_differently_have_other_digests[per_use_inputs]",
        ),
    ),
    Mutation(
        "collectives-run-once",
        "Tensor parallelism: no collective runs twice, unless recompute= names it.",
        "Collectives may be kept or run again, as it is faster.",
        (
            Change(
                "planner/problem/selection.py",
                "    kept += sorted(set(_of_collectives(graph)).difference(again))\n",
                "",
            ),
        ),
        ("tests/distributed/test_tensor_parallel.py::test_collectives_run_again_only_if_that_is_asked_for",),
    ),
    Mutation(
        "collectives-read-until-waited-for",
        "Tensor parallelism: nothing is written over while a collective still reads it.",
        "What a collective reads dies with its call.",
        (
            Change(
                "planner/_torch/operators.py",
                "    return is_collective(operator) and name_of(operator).partition",
                "    return False and name_of(operator).partition",
            ),
        ),
        ("tests/graph/test_dying_operands.py::test_nothing_is_written_over_while_a_collective_reads_it",),
    ),
    Mutation(
        "in-flight",
        "A stage of a pipeline takes what was predicted, with as many micro-batches in flight as planned.",
        "One micro-batch counts.",
        (
            Change(
                "solvers/model/in_flight.py",
                "        return self.count - 1\n",
                "        return 0\n",
            ),
        ),
        ("tests/distributed/test_pipeline.py::test_several_in_flight_take_what_is_measured_of_them[3]",),
    ),
    Mutation(
        "in-flight-more",
        "More micro-batches in flight than planned are warned of.",
        "Any number is taken as planned.",
        (
            Change(
                "planner/compiled/calls.py",
                "len(earlier) >= (self._in_flight or 1)",
                "len(earlier) >= (99 if self._in_flight else 1)",
            ),
        ),
        ("tests/distributed/test_pipeline.py::test_more_in_flight_than_planned_are_warned_of",),
    ),
    Mutation(
        "sharded-tensor-parallel",
        "fully_shard around a model that parallelize_module distributed takes what is predicted.",
        "The shards are predicted of whole parameters.",
        (
            Change(
                "planner/parallel/fully_shard.py",
                "    shape = local_tensor(tensor).shape\n",
                "    shape = tensor.shape\n",
            ),
        ),
        (
            "tests/distributed/test_sharded_tensor_parallel.py::"
            "test_four_ranks_measure_what_was_predicted_and_get_what_they_get_without"
            "[along the sequence, in half precision]",
        ),
    ),
    Mutation(
        "sharded-otherwise",
        "A model that fully_shard shards otherwise than planned says so.",
        "Ranks are counted, and no more.",
        (
            Change(
                "planner/runtime/ddp.py",
                "reduces = warn_of_other_sharding(plan, planned, model)\n",
                "reduces = False\n",
            ),
        ),
        ("tests/distributed/test_sharded_otherwise.py::test_what_is_sharded_otherwise_is_named_once",),
    ),
]
