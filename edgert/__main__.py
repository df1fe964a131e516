"""The command `edgert`, and `python -m edgert`."""

from __future__ import annotations

import signal


def main() -> None:
    """The entry point. Ctrl+C while the command line itself is imported ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from edgert import cli

    signal.signal(signal.SIGINT, handler)
    cli.main()


if __name__ == "__main__":
    main()
