"""Options of Inductor that decide nothing but which code it generates.

A plan file may come from anybody, and Inductor has options that name compilers, folders, and what runs beside
a program. What is not listed here, a plan file cannot switch on: the user gives it again. The list is short
on purpose. Left out are also options that time candidates, that take checks out of programs, and that round
otherwise.
"""

from planner.choices import CUDA_GRAPHS

_SWITCHES = frozenset({
    CUDA_GRAPHS,  # which Inductor is never given: the plan records by itself
    "aggressive_fusion", "allow_buffer_reuse", "constant_and_index_propagation", "conv_1x1_as_mm",
    "cpp.enable_loop_tail_vec", "cpp.enable_tiling_heuristics", "cpp.no_redundant_loops",
    "emulate_precision_casts", "epilogue_fusion", "epilogue_fusion_first", "inplace_buffers",
    "layout_optimization", "loop_ordering_after_fusion", "pattern_matcher", "permute_fusion",
    "pick_loop_orders", "reorder_for_locality", "split_reductions",
})  # fmt: skip
_NUMBERS = {
    "cpp.max_horizontal_fusion_size": 64,
    "cpp.min_chunk_size": 1 << 20,
    "max_fusion_size": 256,
    "max_pointwise_cat_inputs": 64,
    "realize_opcount_threshold": 256,
    "realize_reads_threshold": 256,
    "unroll_reductions_threshold": 64,
}
"""With the largest that is taken: beyond it a program grows, and compiling it takes the machine's memory."""


def decides_code_alone(name: str, value: object) -> bool:
    """Whether an option may be taken from a file of somebody else's."""
    if name in _SWITCHES:
        return isinstance(value, bool)
    return type(value) is int and 1 <= value <= _NUMBERS.get(name, 0)
