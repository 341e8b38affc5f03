"""The command `fedjax-meta`, also `python -m fedjax_meta`; see `cli`."""

import os
import signal
import sys
from typing import Any


def main() -> None:
    """Runs the command."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    try:
        from fedjax_meta.cli import app
    except ImportError as error:
        sys.exit(f"error: {error}; the command needs pip install 'fedjax_meta[experiments]'")
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)
    # As `python -m` does: a study may name a metric or a logger in a module that stands here.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        app(prog_name="fedjax-meta")
    except SystemExit as end:
        _end_at_once(end.code)
        raise


def _leave(number: int, _: Any) -> None:
    """Ends the process while modules are imported, where an exception may be lost: JAX calls back from the garbage collector."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


def _end_at_once(code: Any) -> None:
    """From now on a signal ends the process with this code: all is saved, and threads that still compile need not finish."""

    def leave(*_: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


if __name__ == "__main__":
    main()
