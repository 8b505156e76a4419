"""``python -m autoshard.cli``."""

from autoshard.cli import main

if __name__ == "__main__":
    main()
