"""The kernels of a program, compiled several at a time.

Inductor compiles each kernel by itself. Most of that time goes into the headers and the bindings, not into
the kernel: a program of fifty kernels, as one that recomputes much has, is compiled in a seventh of the time
when sixteen of them are one file. The compiled text is the one that Inductor wrote.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._inductor import async_compile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from planner._torch.patches import replaced

MOST = 16
"""Kernels of one file: of more, little is left to gain, and several processors have nothing to share."""

_KERNEL = re.compile(
    r"""\s*\#include\s<torch/csrc/inductor/cpp_prefix\.h>\n  # all that it includes
    (?P<before>(?:(?!\#include|extern).)*)
    extern\s"C"\s+void\s+kernel\(  # all that it defines for others
    (?P<after>(?:(?!\#include|extern).)*)""",
    re.VERBOSE | re.DOTALL,
)
_METHODS = "static PyMethodDef py_methods[] = {{"
_BINDING = """
static PyObject* kernel_{number}_py({parameters}) {{
    try {{
        {check}
        kernel_{number}::kernel({arguments}); Py_RETURN_NONE;
    }} catch(std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }} catch(...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
        return nullptr;
    }}
}}
"""


@dataclass(frozen=True)
class _Convention:
    """How Python calls a kernel.

    Attributes:
        parameters: The parameters of the C++ function that it calls.
        parsed: The text in Inductor's own bindings that shows that a kernel is called so.
        check: The code that checks the number of arguments.
        method: The function's entry in the table of methods.
    """

    parameters: str
    parsed: str
    check: str
    method: str


_CONVENTIONS = (
    _Convention(
        "PyObject* self, PyObject* args",
        "parse_arg(PyObject* args, size_t n)",
        'if(!PyTuple_CheckExact(args)) [[unlikely]] throw std::runtime_error("tuple args required");\n'
        "        if(PyTuple_GET_SIZE(args) != {count}) [[unlikely]]\n"
        '            throw std::runtime_error("requires {count} args");',
        '{{"{name}", {name}_py, METH_VARARGS, ""}},',
    ),
    _Convention(  # from torch 2.15 on
        "PyObject* self, PyObject* const* args, Py_ssize_t nargs",
        "parse_arg(PyObject* const* args, size_t n)",
        'if(nargs != {count}) [[unlikely]] throw std::runtime_error("requires {count} args");',
        '{{"{name}", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>({name}_py)), '
        'METH_FASTCALL, ""}},',
    ),
)


@dataclass(frozen=True)
class _Kernel:
    """In the place of a kernel until all are known."""

    types: tuple[str, ...]
    source: str


@contextlib.contextmanager
def kernels_compiled_together() -> Iterator[None]:
    """While this is open, the programs that are loaded compile their kernels several at a time."""
    with replaced(async_compile, {"AsyncCompile": _Together}):
        yield


class _Together(async_compile.AsyncCompile):
    """What a program compiles its kernels with."""

    def cpp_pybinding(self, argtypes: Sequence[str], source_code: str) -> Any:
        if _KERNEL.fullmatch(source_code) is None or _METHODS not in _template() or _convention() is None:
            return super().cpp_pybinding(list(argtypes), source_code)
        return _Kernel(tuple(argtypes), source_code)

    def wait(self, scope: dict[str, Any]) -> None:
        waiting = [(name, kernel) for name, kernel in scope.items() if isinstance(kernel, _Kernel)]
        threads = async_compile.get_compile_threads()
        size = max(min(MOST, -(-len(waiting) // max(threads, 1))), 1)
        groups = [waiting[i : i + size] for i in range(0, len(waiting), size)]
        submit = self.submit if threads > 1 else None
        begun = [_begun([kernel for _, kernel in group], submit) for group in groups]
        for group, functions in zip(groups, begun, strict=True):
            scope.update(zip((name for name, _ in group), functions(), strict=True))
        super().wait(scope)


def _begun(kernels: Sequence[_Kernel], submit: Any) -> Callable[[], list[Any]]:
    """Begin to compile kernels as one file; what waits for it returns their functions."""
    parts = ["#include <torch/csrc/inductor/cpp_prefix.h>"]
    for number, kernel in enumerate(kernels):
        found = _KERNEL.fullmatch(kernel.source)
        assert found is not None
        body = f"{found['before']}void kernel({found['after']}"
        parts.append(f"namespace kernel_{number} {{\n{body}\n}}")
    library = type("_Library", (CppPythonBindingsCodeCache,), {
        "entry_function": "kernels",
        "call_entry_function": "Py_RETURN_NONE;",
        "suffix_template": _bound(_template(), kernels),
    })  # fmt: skip
    wait: Any = library.load_pybinding_async([], "\n".join(parts), submit_fn=submit)  # type: ignore[attr-defined]

    def functions() -> list[Any]:
        module = wait().__self__
        return [getattr(module, f"kernel_{number}") for number in range(len(kernels))]

    return functions


def _template() -> str:
    """The text of the bindings, to be formatted."""
    return str(CppPythonBindingsCodeCache.suffix_template)


def _convention() -> _Convention | None:
    """How this Inductor's bindings are called; None if that is not known."""
    return next((each for each in _CONVENTIONS if each.parsed in _template()), None)


def _bound(template: str, kernels: Sequence[_Kernel]) -> str:
    """The bindings' text, with a function for each kernel."""
    called = _convention()
    assert called is not None
    methods, functions = [], []
    for number, kernel in enumerate(kernels):
        types = [kind.replace("const ", "") for kind in kernel.types]
        arguments = ", ".join(f"parse_arg<{kind}>(args, {i})" for i, kind in enumerate(types))
        check = called.check.format(count=len(types))
        parameters = called.parameters
        functions.append(
            _BINDING.format(number=number, parameters=parameters, check=check, arguments=arguments)
        )
        methods.append(called.method.format(name=f"kernel_{number}"))
    written = "".join(functions), "\n".join(methods)
    escaped = [text.replace("{", "{{").replace("}", "}}") for text in written]
    return template.replace(_METHODS, f"{escaped[0]}\n{_METHODS}\n{escaped[1]}")
