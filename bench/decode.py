"""The decoding benchmark: ``python bench/decode.py ...`` is ``carryover bench ...``."""

import sys

from carryover_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
