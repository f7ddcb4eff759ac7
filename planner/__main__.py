"""`python -m planner`."""

import sys

from planner import cli_process
from planner.own_packages import ShadowedError, check_solvers


def main() -> None:
    """Run the command line."""
    cli_process.run(_command)


def _command() -> None:
    try:
        check_solvers()
    except ShadowedError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(cli_process.WRONG_INPUT)
    from planner.cli import app

    app(prog_name="planner" if sys.argv[0].endswith("planner") else "python -m planner")


if __name__ == "__main__":
    main()
