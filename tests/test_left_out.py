"""What did not run is said at the end of `./run test`."""

import pytest


def test_skipped_tests_are_counted_by_their_reason_and_a_choice_is_named(request):
    """`conftest.py` of the root has no name of its own here."""
    (root,) = (one for one in request.config.pluginmanager.get_plugins() if hasattr(one, "left_out"))
    report = pytest.TestReport("a", ("a", 1, "a"), {}, "skipped", ("a.py", 7, "Skipped: no helm: install it"), "call")
    lines = root.left_out([report, report], "not slow")
    assert lines == ["    2 skipped: no helm: install it", "Chosen by `-m 'not slow'`: without it, all tests run."]
    assert root.left_out([], "") == []
