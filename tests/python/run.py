"""`run.py ARGUMENTS` is `pytest ARGUMENTS`, as ctest runs it: tests share one import of torch (origin.py).
The ranks of a test are forks of a process that is forked here, before pytest begins. By hand, pytest alone
will do: ranks.py then starts that process."""

import importlib.util
import pathlib
import re
import sys


def main():
    files = [pathlib.Path(name).read_text() for name in sys.argv[1:] if name.endswith(".py")]
    # without them, nothing is run
    needed = re.findall(r'^(?:\w+ = )?pytest.importorskip\("(\w+)', "".join(files), re.MULTILINE)
    starts_ranks = any("import ranks" in file for file in files)
    if ("torch" in needed or starts_ranks) and all(map(importlib.util.find_spec, needed)):
        import origin

        origin.run()
        import preloaded  # noqa: F401

        if starts_ranks:
            import ranks

            ranks.fork_origin()
    import pytest

    return pytest.main(sys.argv[1:])


if __name__ == "__main__":  # each rank imports the main module of its parent once more
    sys.exit(main())
