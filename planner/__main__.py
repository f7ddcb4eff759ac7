"""`python -m planner`."""

import sys

from planner.cli import process
from planner.cli.own_packages import ShadowedError, check_solvers


def main() -> None:
    """Run the command line."""
    process.run(_command)


def _command() -> None:
    try:
        check_solvers()
    except ShadowedError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(process.WRONG_INPUT)
    from planner.cli.commands import app

    app(prog_name="planner" if sys.argv[0].endswith("planner") else "python -m planner")


if __name__ == "__main__":
    main()
