"""``python -m fleet_train <command>``."""

from fleet_train.cli import main

if __name__ == "__main__":
    main()
