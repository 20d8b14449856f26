"""``python -m carryover_ext`` is ``carryover``."""

import sys

from .cli import main

sys.exit(main())
