"""Kernels of Inductor's programs, compiled several at a time."""

from typing import Any

import pytest
import torch
from torch._inductor import async_compile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from planner._torch.inductor import kernels
from planner._torch.inductor.kernels import kernels_compiled_together

SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    for(int64_t x0=0; x0<4; x0+=1) { out_ptr0[x0] = in_ptr0[x0] * %d; }
}
"""


def program(sources: list[str]) -> dict[str, Any]:
    """What a program of such kernels has, once it is loaded."""
    types = ["const float*", "float*"]
    with kernels_compiled_together():
        compiler = async_compile.AsyncCompile()
        scope = {f"cpp_{i}": compiler.cpp_pybinding(types, source) for i, source in enumerate(sources)}
        compiler.wait(scope)
    return scope


def test_kernels_share_a_file_and_others_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def load_async(_cls: Any, main_code: str, *_: Any, **__: Any) -> Any:
        compiled.append(main_code)
        module = type(torch)("compiled")
        for number in range(kernels.MOST):
            setattr(module, f"kernel_{number}", (len(compiled), number))
        functions = [type("Bound", (), {"__self__": module})() for _ in range(2)]
        module.kernels, module.kernel = functions  # type: ignore[attr-defined]
        return lambda: module

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", classmethod(load_async))
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    other = SOURCE.replace("extern", "#include <c10/util/Unroll.h>\nextern") % 1
    scope = program([other, *(SOURCE % i for i in range(kernels.MOST + 3))])
    assert [code.count("void kernel(") for code in compiled[1:]] == [kernels.MOST, 3]
    assert "Unroll" in compiled[0]
    assert [scope[f"cpp_{i}"] for i in (1, 2, kernels.MOST + 1)] == [(2, 0), (2, 1), (3, 0)]


FROM_2_15 = {
    "PyObject* args, size_t n": "PyObject* const* args, size_t n",
    "PyTuple_GET_ITEM(args, n)": "args[n]",
    "PyObject* self, PyObject* args": "PyObject* self, PyObject* const* args, Py_ssize_t nargs",
    "!PyTuple_CheckExact(args)": "false",
    "PyTuple_GET_SIZE(args)": "nargs",
    "{entry_func}_py, METH_VARARGS": "reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>("
    "{entry_func}_py)), METH_FASTCALL",
}
"""How Inductor's bindings are called by PyTorch 2.15, in the place of how they are by 2.13."""


def test_bindings_that_are_called_in_an_unknown_way_are_inductors_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = []
    template = CppPythonBindingsCodeCache.suffix_template.replace("args, size_t n", "given, size_t n")
    monkeypatch.setattr(CppPythonBindingsCodeCache, "suffix_template", template)
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda _, *given: own.append(given))
    program([SOURCE % i for i in range(3)])
    assert len(own) == 3


@pytest.mark.heavy
@pytest.mark.parametrize(("threads", "convention"), [(2, {}), (1, FROM_2_15)])
def test_each_kernel_is_its_own(
    monkeypatch: pytest.MonkeyPatch, threads: int, convention: dict[str, str]
) -> None:
    template = CppPythonBindingsCodeCache.suffix_template
    for old, new in convention.items():
        template = template.replace(old, new)
    monkeypatch.setattr(CppPythonBindingsCodeCache, "suffix_template", template)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: threads)
    scope = program([SOURCE % (i + threads + len(convention)) for i in range(3)])
    given, made = torch.arange(4.0), torch.empty(4)
    for i in range(3):
        scope[f"cpp_{i}"](given, made)
        assert made.tolist() == (given * (i + threads + len(convention))).tolist()
    with pytest.raises(RuntimeError, match="requires 2 args"):
        scope["cpp_0"](given)
