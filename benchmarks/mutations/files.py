"""Mutations that disable what is promised for plan files, and where a solver is missing or slow."""

from benchmarks.mutations.record import Change, Mutation

_PARSE = '            data = from_json(text, allow_inf_nan=True, cache_strings="keys")\n'

FILES = [
    Mutation(
        "changed-bytes",
        "A plan file with changed bytes is a plan or refused in words for people.",
        "What the parser says is passed on as it is.",
        (
            Change(
                "planner/planfile/plan.py",
                "        except ValueError as error:\n"
                '            raise PlanFileError(f"{source}: not valid JSON',
                "        except LookupError as error:\n"
                '            raise PlanFileError(f"{source}: not valid JSON',
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_any_change_of_bytes_is_a_plan_or_refused",),
    ),
    Mutation(
        "changed-structure",
        "A plan file with a wrong field is refused, and the field is named.",
        "Errors say what is wrong, and not where.",
        (
            Change(
                "planner/planfile/plan.py",
                '    return f"{field}: {message}{more}"\n',
                '    return f"{message}{more}"\n',
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_a_wrong_field_is_named",),
    ),
    Mutation(
        "schedule-is-checked",
        "A schedule that a file has out of order is refused when it is read.",
        "Schedules are read without a look at their order.",
        (
            Change(
                "planner/planfile/graph_record.py",
                "            if op_id != awaited:\n",
                "            if op_id == awaited and op_id >= count:\n",
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_a_wrong_field_is_named",),
    ),
    Mutation(
        "no-code",
        "Reading a plan file runs no code.",
        "What is no JSON is tried as a pickle.",
        (
            Change(
                "planner/planfile/plan.py",
                "        except ValueError as error:\n"
                '            raise PlanFileError(f"{source}: not valid JSON',
                "        except ValueError as error:\n"
                "            import pickle\n"
                "\n"
                "            if isinstance(text, bytes) and text[:1] == pickle.PROTO:\n"
                "                return pickle.loads(text)\n"
                '            raise PlanFileError(f"{source}: not valid JSON',
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_reading_a_file_runs_no_code",),
    ),
    Mutation(
        "no-program",
        "A plan file runs no program of its author's choice.",
        "Options of Inductor are taken from a file, whatever they decide.",
        (
            Change(
                "planner/planning/backends.py",
                "        if not decides_code_alone(name, value) and not _is_same(own, name, value):\n",
                "        if not decides_code_alone(name, value) and own.get(name, value) != value:\n",
            ),
        ),
        ("tests/hostile/test_hostile_options.py::test_a_plan_file_runs_no_program_of_its_authors_choice",),
    ),
    Mutation(
        "no-crash",
        "No file makes reading a plan crash.",
        "Files are read by a parser that nested lists bring down.",
        (
            Change(
                "planner/planfile/plan.py",
                _PARSE,
                "            import json\n\n            data = json.loads(text)\n",
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_other_json_is_refused",),
    ),
    Mutation(
        "re-runs-are-checked",
        "A plan that somebody has changed cannot change what a model computes.",
        "A plan may re-run whatever it says.",
        (
            Change(
                "planner/runtime/remap.py",
                "        and reruns_what_may_run(record, joint)\n",
                "",
            ),
        ),
        (
            "tests/behaviour/modules/test_installed_steps.py::test_a_plan_that_was_tampered_with_cannot_change_results",
        ),
    ),
    Mutation(
        "no-partial-apply",
        "A plan that is refused for a model leaves it alone.",
        "The plan is installed before it is compared with the model.",
        (
            Change(
                "planner/runtime/install.py",
                "    found = class_name(model)\n",
                "    install(model, _call_of(plan, model))\n    found = class_name(model)\n",
            ),
        ),
        ("tests/runtime/test_install.py::test_another_model_is_refused_and_left_alone",),
    ),
    Mutation(
        "read-only-directory",
        "A read-only directory is found out before a plan is written, and named.",
        "Whether a directory takes files is not tried.",
        (
            Change(
                "planner/planfile/atomic_file.py",
                "            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))\n"
                "            os.unlink(probe)\n",
                "            os.access(probe, os.W_OK)\n",
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_a_read_only_directory_is_named",),
    ),
    Mutation(
        "disk-full",
        "A plan that no longer fits the disk leaves the file that was there.",
        "Plans are written straight into their files.",
        (
            Change(
                "planner/planfile/atomic_file.py",
                'with open(temporary, "xb") as file:',
                'with open(target, "wb") as file:',
            ),
            Change(
                "planner/planfile/atomic_file.py",
                "os.replace(temporary, target)",
                "os.replace(target, target)",
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_a_failing_save_leaves_what_was_there[True-os.fsync]",),
    ),
    Mutation(
        "interrupted-save",
        "A save that is interrupted leaves no other file behind.",
        "Only errors are cleaned up after, not interruptions.",
        (
            Change(
                "planner/planfile/atomic_file.py",
                "        except BaseException:\n            with contextlib",
                "        except Exception:\n            with contextlib",
            ),
        ),
        ("tests/planfile/test_plan_file.py::test_a_failing_save_leaves_what_was_there",),
    ),
    Mutation(
        "solver-missing",
        "Without any integer solver an answer is still found, and it is said what to install.",
        "That CBC does not run is an error.",
        (
            Change(
                "solvers/milp.py",
                "    except pulp.PulpSolverError as error:\n",
                "    except FileNotFoundError as error:\n",
            ),
        ),
        ("tests/solvers/test_portfolio.py::test_without_any_integer_solver_an_answer_is_still_found",),
    ),
    Mutation(
        "solver-times-out",
        "A solver that runs out of time gives what it has, in time.",
        "HiGHS does not get its time limit.",
        (
            Change(
                "solvers/milp.py",
                '        solver.setOptionValue("time_limit", max(0.01, time_limit))\n',
                '        solver.setOptionValue("time_limit", 1e9)\n',
            ),
        ),
        (
            "tests/solvers/test_milp.py::test_a_time_limit_is_kept_and_an_unfinished_answer_is_not_called_optimal",
        ),
    ),
]
