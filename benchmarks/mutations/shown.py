"""Mutations that disable what is promised of explanations, reports and comparisons."""

from benchmarks.mutations.record import Change, Mutation

SHOWN = [
    Mutation(
        "explain-simulates",
        "What keeping a module would take is what the simulator gives for the schedule without its re-runs.",
        "Re-runs that were there only for those of the module stay in the schedule.",
        (
            Change(
                "planner/report/explanation.py",
                "            if not idle.any():\n",
                "            if True:\n",
            ),
        ),
        ("tests/report/test_explain.py::test_its_claims_are_the_simulators",),
    ),
    Mutation(
        "explain-is-of-the-plan",
        "An explanation of a plan file whose figures do not go with its schedule is refused.",
        "The simulated peak is not compared with the predicted one.",
        (
            Change(
                "planner/planfile/simulated.py",
                "    if timeline.peak_bytes != plan.predicted.dynamic_peak_bytes:\n",
                "    if timeline.peak_bytes < 0:\n",
            ),
        ),
        ("tests/report/test_explain.py::test_a_step_that_does_not_give_the_predicted_peak_is_refused",),
    ),
    Mutation(
        "no-plan-can-drop",
        "What no plan can drop at the peak is there in every other schedule as well.",
        "All that is alive counts as needed.",
        (
            Change(
                "planner/report/undroppable.py",
                "                (now < forward or graph.recompute_row[v] < 0)\n                and any(",
                "                True\n                or any(",
            ),
        ),
        ("tests/report/test_page.py::test_what_no_plan_can_drop_is_there_in_other_plans_too",),
    ),
    Mutation(
        "page-escapes",
        "Names of modules cannot inject anything into a report.",
        "The data of the page is written as it is.",
        (Change("planner/report/page/html.py", '"data": data.replace("<", "\\\\u003c")', '"data": data'),),
        ("tests/report/test_page.py::test_names_cannot_inject_anything",),
    ),
]
