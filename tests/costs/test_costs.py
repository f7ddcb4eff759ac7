"""The roofline: exact seconds of known operations, on fake tensors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.costs.devices import find_device
from planner.costs.roofline import Roofline, bytes_moved, op_flops, roofline, tensor_bytes

aten = torch.ops.aten
CPU = find_device("cpu")
A100 = find_device("A100-80GB")


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def run(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    return func, args, kwargs, func(*args, **kwargs)


def flops(func: Any, *args: Any, **kwargs: Any) -> float:
    return op_flops(*run(func, *args, **kwargs))


def seconds(func: Any, *args: Any, **kwargs: Any) -> float:
    return roofline(CPU).seconds(*run(func, *args, **kwargs))


def cpu_seconds(flops: float, moved: float) -> float:
    return max(flops / 125e9, moved / 10e9) + 2e-6


def test_matrix_product_is_bound_by_arithmetic() -> None:
    a, b = torch.empty(256, 512), torch.empty(512, 1024)
    assert seconds(aten.mm.default, a, b) == cpu_seconds(2 * 256 * 512 * 1024, 0)


def test_a_complex_product_is_four_real_ones() -> None:
    a = torch.empty(512, 512, dtype=torch.complex64)
    assert seconds(aten.mm.default, a, a) == cpu_seconds(4 * 2 * 512**3, 0)


def test_matrix_times_thin_matrix_is_bound_by_memory() -> None:
    a, b = torch.empty(256, 512), torch.empty(512, 1)
    assert seconds(aten.mm.default, a, b) == cpu_seconds(0, 4 * (256 * 512 + 512 + 256))


@pytest.mark.parametrize(
    ("func", "shapes", "expected"),
    [
        (aten.mm.default, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (aten.addmm.default, [(7,), (3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (aten.bmm.default, [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (aten.baddbmm.default, [(2, 3, 7), (2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (aten.mv.default, [(3, 5), (5,)], 2 * 3 * 5),
        (aten.addmv.default, [(3,), (3, 5), (5,)], 2 * 3 * 5),
        (aten.dot.default, [(5,), (5,)], 2 * 5),
        (aten.linear.default, [(2, 3, 5), (7, 5)], 2 * 2 * 3 * 5 * 7),
        (aten.linear.default, [(2, 3, 5), (5,)], 2 * 2 * 3 * 5),
        (aten.add.Tensor, [(3, 5), (3, 5)], 0),
    ],
)
def test_flops_of_matrix_operations(func: Any, shapes: list[tuple[int, ...]], expected: int) -> None:
    assert flops(func, *[torch.empty(shape) for shape in shapes]) == expected


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("transposed", [False, True])
def test_flops_of_convolutions_heed_groups(groups: int, transposed: bool) -> None:
    x = torch.empty(2, 16, 8, 8)
    w = torch.empty(16, 32 // groups, 3, 3) if transposed else torch.empty(32, 16 // groups, 3, 3)
    arguments = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    forward = 2 * 2 * 8 * 8 * 16 * 32 * 9 / groups
    assert flops(aten.convolution.default, x, w, None, *arguments) == forward
    y = torch.empty(2, 32, 8, 8)
    for mask, products in (([True, True, False], 2), ([False, True, True], 1), ([False, False, True], 0)):
        backward = (y, x, w, [32], *arguments, mask)
        assert flops(aten.convolution_backward.default, *backward) == products * forward


def test_convolution_seconds() -> None:
    x, w = torch.empty(4, 64, 32, 32), torch.empty(128, 64, 3, 3)
    call = (aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert seconds(*call) == cpu_seconds(2 * 4 * 32 * 32 * 64 * 128 * 9, 0)


def test_attention_on_cpu_which_the_registry_lacks() -> None:
    q, k, v = torch.empty(2, 4, 128, 16), torch.empty(2, 4, 64, 16), torch.empty(2, 4, 64, 16)
    product = 2 * 2 * 4 * 128 * 64 * 16
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops(forward, q, k, v) == 2 * product
    out, logsumexp = forward(q, k, v)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops(backward, out, q, k, v, out, logsumexp, 0.0, False) == 5 * product
    moved = 4 * (2 * 2 * 4 * 128 * 16 + 2 * 2 * 4 * 64 * 16 + 2 * 4 * 128)
    assert seconds(forward, q, k, v) == cpu_seconds(2 * product, moved)


def test_recurrent_layer() -> None:
    x, hidden = torch.empty(10, 3, 8), torch.empty(1, 3, 16)
    weights = (torch.empty(64, 8), torch.empty(64, 16), torch.empty(64), torch.empty(64))
    rest = (False, [], 2, 16, 1, True, False, False, True)
    call = (aten.mkldnn_rnn_layer.default, (x, *weights, hidden, hidden, *rest), {}, [x])
    assert op_flops(*call) == 2 * 10 * 3 * 64 * (8 + 16)


def test_elementwise_moves_inputs_and_outputs() -> None:
    x, y = torch.empty(1000, 100), torch.empty(1000, 100)
    assert seconds(aten.mul.Tensor, x, y) == cpu_seconds(0, 3 * 400_000)
    assert seconds(aten.gelu.default, x) == cpu_seconds(0, 2 * 400_000)
    assert seconds(aten._to_copy.default, x, dtype=torch.bfloat16) == cpu_seconds(0, 600_000)


def test_the_same_input_twice_is_read_once() -> None:
    x = torch.empty(1000, 100)
    assert bytes_moved(*run(aten.mul.Tensor, x, x)) == 2 * 400_000
    # and the memory of earlier questions does not confuse the two
    assert seconds(aten.mul.Tensor, x, torch.empty(1000, 100)) > seconds(aten.mul.Tensor, x, x)


def test_expanded_tensors_count_what_they_have() -> None:
    x, row = torch.empty(1000, 100), torch.empty(1, 100).expand(1000, 100)
    assert tensor_bytes(row) == 400
    assert bytes_moved(*run(aten.add.Tensor, x, row)) == 2 * 400_000 + 400
    assert tensor_bytes(torch.empty(0, 3).expand(0, 3)) == 0


def test_tensors_in_lists_count() -> None:
    parts = [torch.empty(10, 10), torch.empty(20, 10)]
    assert bytes_moved(*run(aten.cat.default, parts)) == 4 * (300 + 300)
    assert bytes_moved(*run(aten.split.Tensor, torch.empty(10, 10), 5)) == 4 * 200


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.view.default, ([20, 5],)),
        (aten.t.default, ()),
        (aten.transpose.int, (0, 1)),
        (aten.expand.default, ([3, 10, 10],)),
        (aten.slice.Tensor, (0, 2, 5)),
        (aten.select.int, (0, 1)),
        (aten.split.Tensor, (5,)),
        (aten.detach.default, ()),
        (aten.unsqueeze.default, (0,)),
        (aten._unsafe_view.default, ([100],)),
        (aten.reshape.default, ([100],)),
        (aten.sym_size.int, (0,)),
    ],
)
def test_views_are_free(func: Any, arguments: tuple[Any, ...]) -> None:
    assert seconds(func, torch.empty(10, 10), *arguments) == 0


def test_a_reshape_that_copies_is_not_free() -> None:
    assert seconds(aten.reshape.default, torch.empty(100, 100).t(), [10_000]) == cpu_seconds(0, 80_000)
    assert seconds(aten.reshape.default, torch.empty(100, 100), [10_000]) == 0


def test_what_is_no_operator_is_free() -> None:
    import operator

    pair = (torch.empty(3), torch.empty(3))
    assert roofline(CPU).seconds(operator.getitem, (pair, 0), {}, pair[0]) == 0


def test_lookups_read_only_the_rows_they_take() -> None:
    table, rows = torch.empty(50_000, 64), torch.zeros(10, dtype=torch.int64)
    assert bytes_moved(*run(aten.embedding.default, table, rows)) == 2 * 10 * 64 * 4 + 80
    assert bytes_moved(*run(aten.index.Tensor, table, [rows])) == 2 * 10 * 64 * 4 + 80


def test_allocation_moves_nothing_and_filling_only_writes() -> None:
    x = torch.empty(100, 100)
    assert bytes_moved(*run(aten.empty_like.default, x)) == 0
    assert bytes_moved(*run(aten.zeros_like.default, x)) == 40_000
    assert bytes_moved(*run(aten.bernoulli_.float, x, 0.5)) == 40_000
    assert bytes_moved(*run(aten.add_.Tensor, x, 1)) == 80_000


def test_half_precision_is_faster_on_a_gpu() -> None:
    def on_a100(dtype: torch.dtype) -> float:
        a = torch.empty(4096, 4096, dtype=dtype)
        return roofline(A100).seconds(*run(aten.mm.default, a, a))

    assert on_a100(torch.float32) == pytest.approx(2 * 4096**3 / 19.5e12 + 4e-6)
    assert on_a100(torch.bfloat16) == pytest.approx(2 * 4096**3 / 312e12 + 4e-6)


def test_convolutions_use_tf32_by_default() -> None:
    x, w = torch.empty(32, 256, 56, 56), torch.empty(256, 256, 3, 3)
    call = run(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    arithmetic = 2 * 32 * 56 * 56 * 256 * 256 * 9
    assert roofline(A100).seconds(*call) == pytest.approx(arithmetic / 156e12 + 4e-6)
    assert roofline(find_device("V100-32GB")).seconds(*call) == pytest.approx(arithmetic / 15.7e12 + 4e-6)


def test_answers_are_remembered_by_what_they_depend_on() -> None:
    roofline = Roofline(CPU)
    for rows in (3, 3, 4):
        roofline.seconds(*run(aten.mm.default, torch.empty(rows, 5), torch.empty(5, 7)))
    roofline.seconds(
        *run(aten.mm.default, torch.empty(3, 5, dtype=torch.float64), torch.zeros(5, 7).double())
    )
    assert len(roofline._seconds) == 3
    one = roofline.seconds(*run(aten.sum.dim_IntList, torch.empty(100, 100), [0]))
    both = roofline.seconds(*run(aten.sum.dim_IntList, torch.empty(100, 100), [0, 1]))
    assert one != both


def test_what_data_size_takes_the_seconds_of_its_size() -> None:
    x = torch.empty(1000, 1000)
    mask = torch.empty(1000, 1000, dtype=torch.bool)
    device = Roofline(CPU)
    few, many = (
        device.seconds(aten.masked_select.default, (x, mask), {}, x.view(-1)[:n]) for n in (1, 10**6)
    )
    assert many - few == pytest.approx(4 * (10**6 - 1) / 10e9)
