"""What can be planned for which backend, seen before the long work."""

from planner.errors import CompilerError, warn
from planner.planning.options import OptionError, PlanOptions


def check_backend(options: PlanOptions) -> None:
    """See that Inductor can be planned for with such options, before the long work.

    Raises:
        OptionError: An option is unknown to Inductor, given for eager, or not possible with Inductor.
        CompilerError: There is no C++ compiler.
    """
    if options.in_flight is not None and options.parallel is not None:
        raise OptionError("in_flight=: expected none with parallel=; a stage of a pipeline is one process's")
    if options.backend == "eager":
        if options.backend_options:
            raise OptionError("backend_options=: expected none with backend='eager'; they are Inductor's")
        return
    if options.in_flight is not None:
        raise OptionError(
            "in_flight=: expected none with backend='inductor'; stages of pipelines run eagerly"
        )
    if options.parallel is not None:
        raise OptionError("parallel=: expected none with backend='inductor': it is for a single process")
    from planner._torch.inductor import compiling  # Inductor is not imported without need

    wrong = compiling.unusable_options(options.backend_options)
    if wrong is not None:
        raise OptionError(f"backend_options={dict(options.backend_options)!r}: {wrong}")
    missing = compiling.missing_compiler()
    if missing is not None:
        raise CompilerError(f"{compiling.NO_COMPILER} ({missing})")
    unused = compiling.unused_vectors()
    if unused is not None:
        warn(
            f"Inductor finds no vector instructions that work, though this CPU has {unused}: its programs "
            "will run several times slower, with a plan or without. It looks in a process of its own, which "
            "fails if a file beside the script is called like a module of Python's, as encodings.py: give "
            "that another name"
        )
