"""Arguments that decide what an operator allocates, where it is run to see that."""

import pytest
import torch

from planner.costs.workspace import WorkspaceMeter
from planner.training_step.call import Call
from planner.verification.measure import measure_peak

aten = torch.ops.aten


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["sum", "mean", "max"])
def test_the_backward_of_bags_is_measured_with_something_in_each(mode: int) -> None:
    weight, indices, offsets = torch.randn(50, 32), torch.arange(200) % 50, torch.arange(0, 200, 5)
    _, bags, sizes, largest = aten._embedding_bag(weight, indices, offsets, False, mode)
    given = (torch.randn(40, 32), indices, offsets, bags, sizes, largest, 50, False, mode, False, None)
    peak = measure_peak(lambda: aten._embedding_bag_backward(*given), "cpu").peak_bytes
    without_data = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), given)
    call = Call(aten._embedding_bag_backward.default, without_data, {})
    (memory,) = WorkspaceMeter("cpu", None).measure([call])
    assert memory.workspace_bytes + sum(memory.output_bytes) == peak


@pytest.mark.parametrize("name", ["linalg_lu_solve", "linalg_ldl_solve", "lu_unpack"])
def test_what_reads_a_factorisation_is_measured_with_pivots_that_exist(name: str) -> None:
    matrices = torch.randn(4, 8, 8)
    factorise = torch.linalg.ldl_factor if "ldl" in name else torch.linalg.lu_factor
    given = (*factorise(matrices + matrices.mT), *([matrices] if "solve" in name else []))
    operator = getattr(aten, name)
    peak = measure_peak(lambda: operator(*given), "cpu").peak_bytes
    without_data = tuple(t.to("meta") for t in given)
    (memory,) = WorkspaceMeter("cpu", None).measure([Call(operator.default, without_data, {})])
    assert memory.workspace_bytes + sum(memory.output_bytes) == peak


def test_a_batch_of_exponentials_is_measured_with_norms_of_which_none_are_alike() -> None:
    eyes = torch.eye(10).expand(5, 10, 10)  # of norm 1
    alike, unlike = eyes * 10, eyes * (10 * 2.0 ** torch.arange(5.0)).view(5, 1, 1)
    peak = measure_peak(lambda: torch.linalg.matrix_exp(unlike), "cpu").peak_bytes
    assert peak > measure_peak(lambda: torch.linalg.matrix_exp(alike), "cpu").peak_bytes
    call = Call(aten.linalg_matrix_exp.default, (torch.empty(5, 10, 10, device="meta"),), {})
    (memory,) = WorkspaceMeter("cpu", None).measure([call])
    assert memory.workspace_bytes + sum(memory.output_bytes) == peak


@pytest.mark.skipif(not hasattr(aten, "_grouped_mm"), reason="grouped products came later")
@pytest.mark.parametrize("form", ["rows", "inner"])
def test_grouped_products_are_measured_with_all_rows_in_one_group(form: str) -> None:
    x, y = torch.randn(96, 64).bfloat16(), torch.randn(96, 32).bfloat16()
    weights = torch.randn(3, 64, 32).bfloat16()
    tensors = (x, weights) if form == "rows" else (x.t(), y)

    def peak(*ends: int) -> int:
        given = (*tensors, torch.tensor(ends, dtype=torch.int32))
        return measure_peak(lambda: aten._grouped_mm(*given), "cpu").peak_bytes

    without_data = (*(t.to("meta") for t in tensors), torch.empty(3, dtype=torch.int32, device="meta"))
    (memory,) = WorkspaceMeter("cpu", None).measure([Call(aten._grouped_mm.default, without_data, {})])
    most = memory.workspace_bytes + sum(memory.output_bytes)
    assert most == peak(96, 96, 96)
    assert most >= max(peak(32, 64, 96), peak(1, 2, 96), peak(0, 50, 96))
