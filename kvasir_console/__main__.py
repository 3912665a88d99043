"""``python -m kvasir_console``."""

from kvasir_console.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
