"""Run the command `fulgurite` as `python -m fulgurite_cli`."""

from fulgurite_cli.command import main

if __name__ == "__main__":
    raise SystemExit(main())
