"""What a deliberate break is."""

import ast
from dataclasses import dataclass
from pathlib import Path


class StaleBreakError(Exception):
    """A break that no longer fits the code."""


@dataclass(frozen=True)
class Change:
    """A replacement in one file.

    Attributes:
        file: Path in the repository.
        old: The text that is there, exactly once.
        new: What a careless change would make of it.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Break:
    """A promise, and a change that breaks it.

    Attributes:
        name: What the command line calls it.
        promise: What users rely on.
        switched_off: What the changes do, in words.
        changes: The changes.
        tests: Node ids of the tests that must notice.
    """

    name: str
    promise: str
    switched_off: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]

    def broken_files(self, root: Path) -> dict[Path, str]:
        """The files that the changes are of, with the text that they make of them.

        Raises:
            StaleBreakError: A text to replace is not there exactly once, or what comes of it is no Python.
        """
        texts: dict[Path, str] = {}
        for change in self.changes:
            path = root / change.file
            text = texts.get(path) or path.read_text()
            count = text.count(change.old)
            if count != 1:
                raise StaleBreakError(
                    f"{self.name}: what it changes is in {change.file} {count} times, expected once: "
                    f"{change.old.strip().splitlines()[0]!r}"
                )
            texts[path] = text.replace(change.old, change.new)
        for path, text in texts.items():
            try:
                ast.parse(text)
            except SyntaxError as error:
                raise StaleBreakError(f"{self.name}: {path.name} is no Python any more: {error}") from error
        return texts
