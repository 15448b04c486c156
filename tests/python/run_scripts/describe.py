"""What a script sees of how it was started."""

import os
import sys

spec = sys.modules["__main__"].__spec__
print(sys.argv, __name__, __file__, __package__, spec and spec.name, os.path.realpath(sys.path[0]))
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
