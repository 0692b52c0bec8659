"""``python -m collm`` is ``collm``."""

from collm.cli import main

main()
