"""``python -m evenly`` is the command ``evenly``."""

from evenly.cli import main

if __name__ == "__main__":
    main(prog_name="evenly")
