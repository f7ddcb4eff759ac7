"""The table of private names that not all versions of PyTorch have."""

from planner import _torch_compat as compat


def test_every_private_name_that_not_all_versions_have_is_there_as_the_table_says() -> None:
    version = compat.version()
    for row in compat.TABLE:
        there = compat.private(row.name) is not None
        if row.argument is not None:
            there = compat.takes_argument(row.name, row.argument)
        assert there == (version >= row.since), row
