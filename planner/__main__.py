"""`python -m planner`."""

import sys

from planner import cli_process


def main() -> None:
    """Run the command line."""
    cli_process.run(_command)


def _command() -> None:
    from planner.cli import app

    app(prog_name="planner" if sys.argv[0].endswith("planner") else "python -m planner")


if __name__ == "__main__":
    main()
