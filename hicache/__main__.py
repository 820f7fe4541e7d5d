"""`python -m hicache`: the command line, where the `hicache` script is not on the PATH."""

from __future__ import annotations

from hicache.cli.main import main

if __name__ == "__main__":
    main()
