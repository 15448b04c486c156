"""python -m tagc"""

import sys

from tagc.commands.main import main

sys.exit(main(sys.argv[1:]))
