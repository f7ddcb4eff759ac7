"""Mutations of results that are kept on the host."""

from benchmarks.mutations.record import Change, Mutation

_PLACE = "planner/_torch/execution/host_place.py"
_TESTS = "tests/lowering/test_offload.py"

OFFLOAD = [
    Mutation(
        "fetches-are-waited-for",
        "Nothing is read before it is fetched.",
        "A fetch is begun, and what reads it does not wait.",
        (
            Change(
                _PLACE,
                '        """Wait until a tensor is back."""\n        return self._wait(tensor)\n',
                '        """Wait until a tensor is back."""\n        return tensor\n',
            ),
        ),
        (f"{_TESTS}::test_whatever_is_sent_and_however_slowly",),
    ),
    Mutation(
        "sends-are-waited-for",
        "What is sent stays until it is on the host, and is let go of there and then.",
        "Nobody waits for a send: the thread of the link holds what it copies, for as long as it likes.",
        (
            Change(
                _PLACE,
                "        return self._wait(kept)\n",
                "        return kept\n",
            ),
        ),
        (f"{_TESTS}::test_whatever_is_sent_and_however_slowly",),
    ),
    Mutation(
        "blocks-stay-for-a-second-backward",
        "A block of the host is free when nobody can ask for it again, not after the first backward.",
        "It is free at once.",
        (
            Change(
                _PLACE,
                "        weakref.finalize(block, _is_free, self._free, memory).atexit = False",
                "        _is_free(self._free, memory)",
            ),
        ),
        (f"{_TESTS}::test_steps_of_all_kinds_find_what_they_sent",),
    ),
    Mutation(
        "the-caller-names-the-folder",
        "A folder that no file can be made in is an error of apply, which leaves the module alone.",
        "The first step finds out.",
        (
            Change(
                _PLACE,
                "            tempfile.TemporaryFile(dir=self.folder).close()\n",
                "            pass\n",
            ),
        ),
        (f"{_TESTS}::test_a_folder_that_is_not_there_is_an_error_and_leaves_the_module_alone",),
    ),
    Mutation(
        "files-do-not-add-up",
        "Files of other shapes are let go of.",
        "They are kept for as long as the planned module lives.",
        (Change(_PLACE, "for size in list(self._free):", "for size in ():"),),
        (f"{_TESTS}::test_files_of_other_shapes_do_not_add_up",),
    ),
    Mutation(
        "emitted-graphs-are-checked",
        "A graph that reads a result before it is fetched is found before it runs.",
        "Only sends are looked at.",
        (
            Change(
                "planner/lowering/transfers.py",
                "            assert [user.target == host.fetched for user in node.users] == [True], node\n",
                "            pass\n",
            ),
        ),
        (f"{_TESTS}::test_a_graph_that_reads_too_early_is_found",),
    ),
    Mutation(
        "what-a-graph-hands-on",
        "A backward reads the fetched input that another graph handed on, and not the input.",
        "The input stays in memory, though the plan sends it.",
        (
            Change(
                "planner/problem/encodings.py",
                "            elif handed and row >= graph.forward_length:\n",
                "            elif False:\n",
            ),
        ),
        (f"{_TESTS}::test_what_one_region_hands_on_to_the_next_leaves_memory_too",),
    ),
]
