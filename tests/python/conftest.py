"""What all files of tests share under pytest."""

import gc

import pytest
import source_tree  # noqa: F401

gc.disable()  # while torch is imported, of which nothing is garbage


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = 77  # all of this file was left out, which ctest calls skipped


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("world_size", 0) > 2:
            item.add_marker("slow")
