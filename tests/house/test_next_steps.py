"""What is said of something that could not be captured, or does not run as planned, says what to do next."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import planner

SOURCE = Path(planner.__file__).parent
BUILDERS = {"CaptureError", "NotWithoutDataError", "warn", "_warn", "unplanned", "hindered_call"}
"""What makes a CaptureError or a PlanWarning of a text."""
VERBS = (
    "Apply|Build|Call|Change|Compile|Compute|Convert|Do|Give|Install|Keep|Leave|Let|Make|Mend|Move|Pad|Pass|Plan"
    "|Put|Return|Run|See|Set|Take|Use|Write"
)
NEXT_STEP = re.compile(rf"(?:^|[.:;,(] |\bor |\band |\bto |models )(?:{VERBS})\b", re.IGNORECASE)
HANDED_ON = {"do", "remedy"}
"""The names of next steps that are handed on."""
WITHOUT = {
    "followed each other's part of the plan",  # the next step is right by itself
    "it was taken out",
    "nothing to differentiate: ",  # tests/training_step/test_inputs.py has what follows
}
"""Of texts that need no next step, a part of each."""


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Where a text is made, and the text with the constants that it names; what is filled in is ``...``."""
    tree = ast.parse(path.read_text())
    module = ".".join(("planner", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")

    def text_of(node: ast.AST, depth: int = 0) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr | ast.BinOp | ast.IfExp | ast.FormattedValue) and depth < 9:
            parts = {
                ast.JoinedStr: lambda n: n.values,
                ast.BinOp: lambda n: [n.left, n.right],
                ast.IfExp: lambda n: [n.body],
                ast.FormattedValue: lambda n: [n.value],
            }[type(node)](node)
            return "".join(text_of(part, depth + 1) for part in parts)
        if isinstance(node, ast.Name) and node.id in HANDED_ON:
            return "Do so"
        if isinstance(node, ast.Name) and node.id.isupper():  # a constant
            return str(getattr(importlib.import_module(module), node.id, "..."))
        return "..."

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            given = " ".join(map(text_of, node.args)) if name in BUILDERS else ""
            if not set(given) <= {".", " "}:
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", given


def test_texts_say_what_to_do() -> None:
    made = [found for path in sorted(SOURCE.rglob("*.py")) for found in _texts(path)]
    assert len(made) > 90
    silent = [f"{where}: {text}" for where, text in made if not _says_what_to_do(text)]
    assert silent == []


def _says_what_to_do(text: str) -> bool:
    return bool(NEXT_STEP.search(text)) or any(part in text for part in WITHOUT)


def test_a_text_without_a_next_step_is_noticed() -> None:
    assert not _says_what_to_do("nothing could be captured: Unsupported: Tensor.item() call")
    assert _says_what_to_do("nothing could be captured: Unsupported: Tensor.item() call. Put that elsewhere")
