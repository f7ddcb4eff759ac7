"""Mutations that disable what keeps files and names of others from doing harm."""

from benchmarks.mutations.record import Change, Mutation

_NAMES = "tests/hostile/test_hostile_names.py"
_FILES = "tests/hostile/test_hostile_files.py"
_DATA = "tests/hostile/test_hostile_data.py"

HOSTILE = [
    Mutation(
        "visible-errors",
        "What an error or a warning says of a name sends nothing to the terminal but its letters.",
        "Errors say names as they are.",
        (
            Change(
                "planner/errors.py",
                '        return printable(super().__str__(), keep="\\n")\n',
                "        return super().__str__()\n",
            ),
        ),
        (f"{_NAMES}::test_errors_and_warnings_are_clean",),
    ),
    Mutation(
        "visible-warnings",
        "A warning sends nothing to the terminal but letters.",
        "Warnings say names as they are.",
        (Change("planner/errors.py", '    text = printable(text, keep="\\n")\n', ""),),
        (f"{_NAMES}::test_errors_and_warnings_are_clean",),
    ),
    Mutation(
        "cells-are-text",
        "What a name in a table looks like is no markup.",
        "Cells are read as markup.",
        (
            Change(
                "planner/report/columns.py",
                "    return Text(printable(cell))\n",
                "    return Text.from_markup(printable(cell))\n",
            ),
        ),
        (f"{_NAMES}::test_markup_in_a_cell_or_a_heading_is_text",),
    ),
    Mutation(
        "visible-reports",
        "What is laid out for people is written out where it would move a cursor, whoever laid it out.",
        "Reports reach the terminal as they were laid out.",
        (
            Change(
                "planner/report/text.py",
                '                yield Segment(printable(text, keep="\\n"), unlinked)\n',
                "                yield Segment(text, unlinked)\n",
            ),
        ),
        (f"{_NAMES}::test_a_report_is_made_visible_whoever_lays_it_out",),
    ),
    Mutation(
        "no-links",
        "A report has no links.",
        "Links of markup stay.",
        (
            Change(
                "planner/report/text.py",
                "style.update_link(None) if style is not None and style.link else style",
                "style",
            ),
        ),
        (f"{_NAMES}::test_markup_in_a_cell_or_a_heading_is_text",),
    ),
    Mutation(
        "visible-lines",
        "A line of the command line sends nothing to the terminal but letters.",
        "Lines are printed as they are.",
        (
            Change(
                "planner/cli/output.py",
                '    typer.echo(printable(text.rstrip("\\n"), keep="\\n"), err=err)\n',
                '    typer.echo(text.rstrip("\\n"), err=err)\n',
            ),
        ),
        (f"{_NAMES}::test_a_command_shows_names_and_does_not_send_them",),
    ),
    Mutation(
        "visible-progress",
        "Progress sends nothing to the terminal but letters.",
        "Progress is told as it is.",
        (
            Change(
                "planner/cli/progress.py",
                'sys.stderr.write(f"{printable(text)} ({fraction:.0%})\\n")',
                'sys.stderr.write(f"{text} ({fraction:.0%})\\n")',
            ),
        ),
        (f"{_NAMES}::test_errors_and_warnings_are_clean",),
    ),
    Mutation(
        "visible-told",
        "The lines that planning tells of send nothing to the terminal but letters.",
        "They are told as they are.",
        (
            Change(
                "planner/environment.py",
                'sys.stderr.write(f"planner: {printable(text)}\\n")',
                'sys.stderr.write(f"planner: {text}\\n")',
            ),
        ),
        (f"{_NAMES}::test_errors_and_warnings_are_clean",),
    ),
    Mutation(
        "visible-page",
        "A page shows names whose letters would turn or hide others written out.",
        "The page's data are as the file has them.",
        (
            Change(
                "planner/report/page/html.py",
                "json.dumps(_visible(page_data(plan, frontier)), ",
                "json.dumps(page_data(plan, frontier), ",
            ),
        ),
        (f"{_NAMES}::test_a_page_has_the_same_tags_whatever_names_are",),
    ),
    Mutation(
        "page-calls-nobody",
        "A page loads nothing and calls nobody, whatever got into it.",
        "It has no policy.",
        (Change("planner/report/page/html.py", "default-src 'none'; ", ""),),
        (f"{_NAMES}::test_a_page_has_the_same_tags_whatever_names_are",),
    ),
    Mutation(
        "no-end-of-a-script",
        "A name in a page is no end of a script.",
        "The page's data are JSON as it is.",
        (
            Change(
                "planner/report/page/html.py",
                'data.replace("<", "\\\\u003c").replace(',
                "data.replace(",
            ),
        ),
        (f"{_NAMES}::test_a_page_has_the_same_tags_whatever_names_are",),
    ),
    Mutation(
        "options-are-looked-at-by-verify",
        "Verifying a plan file runs no program of its author's choice, nor does applying it.",
        "Options of a plan file are not looked at.",
        (
            Change(
                "planner/runtime/install.py",
                "        check_options_of_file(plan, backend_options)\n",
                "        pass\n",
            ),
        ),
        ("tests/hostile/test_hostile_options.py::test_a_plan_file_runs_no_program_of_its_authors_choice",),
    ),
    Mutation(
        "fail-fast",
        "A file of millions of wrong entries is refused at the first.",
        "An error is made for each.",
        (
            Change(
                "planner/planfile/schema.py",
                "Listed = Annotated[list[_T], FailFast()]",
                "Listed = Annotated[list[_T], FailFast(False)]",
            ),
        ),
        (f"{_FILES}::test_a_small_file_that_asks_for_much_is_refused_at_once",),
    ),
    Mutation(
        "step-has-a-size",
        "A small file does not say of millions of executions that they run much.",
        "The size of a step is not looked at.",
        (
            Change(
                "planner/planfile/plan.py",
                "            if ran > MOST_OPS or again > _MOST_RUN:\n",
                "            if ran < 0:\n",
            ),
        ),
        (f"{_FILES}::test_a_small_file_that_asks_for_much_is_refused_at_once",),
    ),
    Mutation(
        "re-runs-have-a-number",
        "A small file does not say that an operation runs again a million times.",
        "Re-runs are not counted.",
        (Change("planner/planfile/graph_record.py", "        if again > most:\n", "        if most < 0:\n"),),
        (f"{_FILES}::test_a_small_file_that_asks_for_much_is_refused_at_once",),
    ),
    Mutation(
        "overheads-are-finite",
        "A plan that loads has an overhead that can be shown and written.",
        "It may be infinite.",
        (
            Change(
                "planner/planfile/plan.py",
                "        if not math.isfinite(self.overhead):\n",
                "        if math.isnan(self.overhead):\n",
            ),
        ),
        (f"{_FILES}::test_a_small_file_that_asks_for_much_is_refused_at_once",),
    ),
    Mutation(
        "regions-are-there",
        "A plan with regions that the model has not is refused before anything changes.",
        "The first step fails.",
        (
            Change(
                "planner/runtime/install.py",
                "    if unknown := set(plan.model.regions).difference(there):\n",
                "    if unknown := set[str]().difference(there):\n",
            ),
        ),
        (f"{_FILES}::test_a_region_that_the_model_has_not_is_refused_before_anything_changes",),
    ),
    Mutation(
        "cached-budgets",
        "A cache that somebody changed is planned again.",
        "A budget that cannot be read is an error of the first training call.",
        (
            Change(
                "planner/lazy/cached.py",
                "    except BudgetError:  # of a file",
                "    except LookupError:  # of a file",
            ),
        ),
        (f"{_FILES}::test_a_cache_that_somebody_changed_is_planned_again",),
    ),
    Mutation(
        "rank-zero-bomb",
        "What rank 0 sends takes no more memory than a plan file may.",
        "It is unpacked whole, however large.",
        (
            Change(
                "planner/lazy/rank_zero.py",
                "    if len(text) > LARGEST_FILE_BYTES:\n",
                "    if len(text) < 0:\n",
            ),
        ),
        (f"{_FILES}::test_a_plan_of_rank_zero_is_no_bomb",),
    ),
    Mutation(
        "figures-are-finite",
        "A device file has no infinite figures.",
        "Bandwidths have no bound.",
        (
            Change(
                "planner/costs/devices.py",
                "or not _SLOWEST <= values[rate] <= _FASTEST:",
                "or values[rate] <= 0:",
            ),
        ),
        (f"{_DATA}::test_a_device_that_cannot_be_is_refused_by_field",),
    ),
    Mutation(
        "like-is-no-file",
        "A device file names a known device, not itself or another file.",
        "It may name a file.",
        (
            Change(
                "planner/costs/devices.py",
                '        if not isinstance(like, str) or like.endswith(".json"):',
                "        if not isinstance(like, str):",
            ),
        ),
        (f"{_DATA}::test_a_device_that_cannot_be_is_refused_by_field",),
    ),
    Mutation(
        "nested-devices",
        "A device file of nested lists is refused.",
        "The parser's error is passed on.",
        (
            Change(
                "planner/costs/devices.py",
                "    except (OSError, ValueError, RecursionError) as error:\n",
                "    except (OSError, ValueError) as error:\n",
            ),
        ),
        (f"{_DATA}::test_a_file_that_is_no_device_is_refused",),
    ),
    Mutation(
        "measurements-have-a-bound",
        "What is remembered of an operator's memory or time is what one can have.",
        "Any number is taken.",
        (Change("planner/costs/measurement_cache.py", "0 <= number <= _MOST for", "0 <= number for"),),
        (f"{_DATA}::test_measurements_that_are_none_are_measured_again",),
    ),
    Mutation(
        "no-class-in-a-pickle",
        "A recorded snapshot runs no code.",
        "Classes that it names are imported.",
        (
            Change(
                "planner/allocator/recorded.py",
                '        raise pickle.UnpicklingError(f"it holds a',
                '        return super().find_class(module, name)\n        print(f"',
            ),
        ),
        ("tests/training_step/test_snapshot.py::test_other_files_are_refused",),
    ),
    Mutation(
        "plain-codes-only",
        "A recorded snapshot is read as plain data: it can ask for nothing else.",
        "All codes of pickles are read.",
        (
            Change(
                "planner/allocator/recorded.py",
                '        raise pickle.UnpicklingError(f"it holds more',
                '        return pickle._Unpickler.dispatch[code]\n        print(f"',
            ),
        ),
        (f"{_DATA}::test_a_pickle_runs_nothing_and_takes_no_more_than_its_size",),
    ),
    Mutation(
        "no-table-of-gigabytes",
        "Reading a pickle of ten bytes makes no table of gigabytes.",
        "The unpickler in C reads it.",
        (
            Change(
                "planner/allocator/recorded.py",
                "    return _PlainData(file).load()\n",
                "    return pickle.Unpickler(file).load()\n",
            ),
        ),
        (f"{_DATA}::test_a_pickle_runs_nothing_and_takes_no_more_than_its_size",),
    ),
    Mutation(
        "histories-have-a-bound",
        "A history with sizes that no memory has is refused.",
        "Any size is taken.",
        (
            Change(
                "planner/allocator/recorded.py",
                "    if not 0 <= int(value) <= _MOST_BYTES:\n",
                "    if int(value) > _MOST_BYTES**9:\n",
            ),
        ),
        (f"{_DATA}::test_a_history_that_cannot_be_is_refused",),
    ),
    Mutation(
        "room-for-what-is-there",
        "Reading a small file takes little memory.",
        "Room for the largest file is made.",
        (
            Change(
                "planner/heap.py",
                "        known = min(found.st_size, most_bytes) if ",
                "        known = most_bytes if ",
            ),
        ),
        (f"{_DATA}::test_a_pickle_runs_nothing_and_takes_no_more_than_its_size",),
    ),
    Mutation(
        "links-of-others",
        "A link that another user put into an open folder is not followed.",
        "Every link is followed.",
        (
            Change(
                "planner/planfile/atomic_file.py",
                "        if _is_link_of_others(shown):\n",
                "        if not shown:\n",
            ),
        ),
        (f"{_FILES}::test_a_link_of_another_user_in_an_open_folder_is_not_followed",),
    ),
]
