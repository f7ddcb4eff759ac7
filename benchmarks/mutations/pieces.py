"""Mutations of losses in pieces, and of the memory that a plan reserves."""

from benchmarks.mutations.record import Change, Mutation

_PIECES = "planner/graph/split/pieces.py"
_RULES = "planner/graph/split/rules.py"
_ARENA = "planner/runtime/arena.py"
_OF_PIECES = "tests/planning/test_split.py"
_OF_ARENAS = "tests/runtime/test_arena.py"

PIECES = [
    Mutation(
        "gradients-that-are-not-linear",
        "Gradients are computed in the forward only if they are multiples of the one that arrives.",
        "What clips them is computed for a gradient of one.",
        (
            Change(
                _PIECES,
                "        linear = all(is_linear(node, self._of_gradients) for node in backward)\n",
                "        linear = True\n",
            ),
        ),
        (f"{_OF_PIECES}::test_what_a_hook_clips_is_split_in_the_backward",),
    ),
    Mutation(
        "the-gradient-that-arrives",
        "Gradients that were computed in the forward are multiplied by the one that arrives.",
        "They are those of a gradient of one.",
        (
            Change(
                _PIECES,
                "later.call(node, aten.mul.Tensor, (made_early, gradient))",
                "later.call(node, aten.mul.Tensor, (made_early, 1.0))",
            ),
        ),
        (f"{_OF_PIECES}::test_the_gradient_that_arrives_multiplies_those_of_the_forward",),
    ),
    Mutation(
        "sums-of-pieces-in-single-precision",
        "Sums over rows of half precision are added up in single precision.",
        "Each piece rounds the sum to half precision.",
        (Change(_PIECES, 'part.meta["val"].dtype in (torch.bfloat16, torch.float16)', "False"),),
        (f"{_OF_PIECES}::test_half_precision_is_added_up_in_single_precision",),
    ),
    Mutation(
        "sums-beyond-half-precision",
        "A sum over rows may be larger than any number of half precision.",
        "Rows of a piece are added up in half precision.",
        (
            Change(
                _RULES,
                '        kwargs["dtype"] = torch.float32  # sums may be',
                "        pass  # sums may be",
            ),
        ),
        (f"{_OF_PIECES}::test_sums_that_are_larger_than_any_number_of_half_precision",),
    ),
    Mutation(
        "a-second-backward-of-pieces",
        "A second backward is an error where the first has used up the gradients.",
        "It multiplies them once more.",
        (Change("planner/hooks/awaiting_backward.py", "        if self._runs_once:", "        if False:"),),
        (f"{_OF_PIECES}::test_a_second_backward_is_an_error_where_the_first_used_up_the_gradients",),
    ),
    Mutation(
        "outputs-that-are-not-kept",
        "Logits that are not kept are an error also where they are added to something in place.",
        "PyTorch adds nothing, without a word.",
        (
            Change(
                "planner/hooks/outputs_not_kept.py",
                "        raise PlanMismatch(_NO_DATA)  # PyTorch adds",
                "        return result  # PyTorch adds",
            ),
        ),
        (f"{_OF_PIECES}::test_outputs_that_are_not_kept_say_so",),
    ),
    Mutation(
        "ranks-with-other-pieces",
        "Ranks whose plans split the loss otherwise are an error.",
        "They train apart.",
        (Change("planner/graph/spec.py", "layouts, self.split]", "layouts]"),),
        ("tests/distributed/test_ranks.py::test_ranks_that_run_differently_have_other_digests[split]",),
    ),
    Mutation(
        "segments-that-have-gone",
        "Segments that were given back to the device are reserved again.",
        "They are reserved once.",
        (
            Change(
                _ARENA,
                "        if self._disabled or memory.frees() == self._frees:\n",
                "        if self._disabled or self._frees is not None:\n",
            ),
        ),
        (f"{_OF_ARENAS}::test_segments_that_have_gone_are_reserved_again",),
    ),
    Mutation(
        "segments-at-addresses-of-others",
        "A smaller segment at the address of one that has gone is another.",
        "It is taken for the one that has gone.",
        (Change(_ARENA, "if _within(address, segments, size):", "if _within(address, segments):"),),
        (f"{_OF_ARENAS}::test_a_smaller_segment_at_the_same_address_is_another",),
    ),
    Mutation(
        "patches-without-a-row",
        "PyTorch is patched only by a row of the table.",
        "Whoever patches need not say why.",
        (Change("planner/_torch/patches.py", "    if row is None:\n", "    if False:\n"),),
        ("tests/house/test_patches_of_pytorch.py::test_what_has_no_row_is_not_replaced",),
    ),
]
