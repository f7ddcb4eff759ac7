"""Breaks of what planning promises to leave alone: everything of the user's."""

from benchmarks.broken.record import Break, Change

BELONGINGS = [
    Break(
        "gradients-after-planning",
        "Planning leaves the user's gradients alone, whatever a copy of the module still holds on to.",
        "Gradients that arrived are not taken away again.",
        (
            Change(
                "planner/intact.py",
                "                tensor.grad = before.gradient\n",
                "                pass\n",
            ),
        ),
        ("tests/test_intact.py::test_modules_from_around_a_function_are_left_alone",),
    ),
    Break(
        "data-after-planning",
        "Where the step is captured with data, statistics of modules from around it stay as they were.",
        "What was written to is not put back.",
        (
            Change(
                "planner/intact.py",
                "                    tensor.copy_(before.data)\n",
                "                    pass\n",
            ),
        ),
        ("tests/test_intact.py::test_modules_from_around_a_function_are_left_alone",),
    ),
    Break(
        "variables-after-planning",
        "Planning leaves no tensors without data in the user's variables.",
        "Only tensors are put back.",
        (
            Change(
                "planner/intact.py",
                "        for put_back in self._python:\n            put_back()\n",
                "",
            ),
        ),
        (
            "tests/test_intact.py::test_variables_of_files_and_classes_are_left_alone",
            "tests/test_intact.py::test_what_a_loss_refers_to_is_left_alone",
        ),
    ),
]
