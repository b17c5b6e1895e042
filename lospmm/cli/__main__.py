"""``python -m lospmm.cli``."""

from lospmm.cli.main import main

main()
