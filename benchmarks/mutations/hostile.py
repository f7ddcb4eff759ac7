"""Mutations that disable what keeps files and names of others from doing harm."""

from benchmarks.mutations.record import Change, Mutation

_NAMES = "tests/test_hostile_names.py"

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
]
