"""The command `fedjax-meta`, also `python -m fedjax_meta`; see `cli`."""

import sys


def main() -> None:
    """Runs the command."""
    try:
        from fedjax_meta.cli import app
    except ImportError as error:
        sys.exit(f"error: {error}; the command needs pip install 'fedjax_meta[experiments]'")
    app(prog_name="fedjax-meta")


if __name__ == "__main__":
    main()
