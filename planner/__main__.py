"""`python -m planner`."""

import sys


def main() -> None:
    """Run the command line."""
    from planner.cli import app

    app(prog_name="planner" if sys.argv[0].endswith("planner") else "python -m planner")


if __name__ == "__main__":
    main()
