"""What a mutation is."""

import ast
from dataclasses import dataclass
from pathlib import Path


class StaleMutationError(Exception):
    """A mutation that no longer fits the code."""


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
class Mutation:
    """A promise, and a change that breaks it.

    Attributes:
        name: What the command line calls it.
        promise: What users rely on.
        disabled: What the changes do, in words.
        changes: The changes.
        tests: Node ids of the tests that must notice.
    """

    name: str
    promise: str
    disabled: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]

    def mutated_files(self, root: Path) -> dict[Path, str]:
        """The files that the changes are of, with the text that they make of them.

        Raises:
            StaleMutationError: A text to replace is not there exactly once, or what comes of it is no Python.
        """
        texts: dict[Path, str] = {}
        for change in self.changes:
            path = root / change.file
            text = texts.get(path) or path.read_text()
            count = text.count(change.old)
            if count != 1:
                raise StaleMutationError(
                    f"{self.name}: what it changes is in {change.file} {count} times, expected once: "
                    f"{change.old.strip().splitlines()[0]!r}"
                )
            texts[path] = text.replace(change.old, change.new)
        for path, text in texts.items():
            try:
                ast.parse(text)
            except SyntaxError as error:
                raise StaleMutationError(f"{self.name}: {path.name} is no longer Python: {error}") from error
        return texts
