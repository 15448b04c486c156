"""`run.py ARGUMENTS` is `pytest ARGUMENTS`, as ctest runs it: it imports torch once, for pytest and for the ranks of the tests, which are
forks of a process that is forked here, before pytest begins. By hand, pytest alone will do: ranks.py then starts that process."""

import importlib.util
import pathlib
import sys


def main():
    has_ranks = any(name.endswith(".py") and "import ranks" in pathlib.Path(name).read_text() for name in sys.argv[1:])
    if has_ranks and importlib.util.find_spec("torch"):
        import preloaded  # noqa: F401
        import ranks

        ranks.fork_origin()
    import pytest

    return pytest.main(sys.argv[1:])


if __name__ == "__main__":  # each rank imports the main module of its parent once more
    sys.exit(main())
