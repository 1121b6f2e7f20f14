"""Entry point of the command `snugfit`: plugins load before the modules that use features.

Ctrl-C during the imports ends the process at once. An exception could surface in any module, as a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


def _end(*_: object) -> None:
    """Print that the command was interrupted, and end the process. This signal handler is active during
    imports.
    """
    os.write(2, b"snugfit: interrupted\n")
    os._exit(INTERRUPTED)


# Ctrl-C may be ignored, as in a shell's background jobs.
RAISES = signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""True if Ctrl-C raises `KeyboardInterrupt` while a command runs."""

if RAISES:
    signal.signal(signal.SIGINT, _end)


def main() -> None:
    """Load the plugins that the command line names, then run its command. This is the console entry point."""
    from snugfit.errors import SnugfitError, escape_controls

    try:
        from snugfit.cli.plugins import named_plugins
        from snugfit.feature_folders import use_plugins

        use_plugins(named_plugins(sys.argv[1:]))
        from snugfit.cli.main import main as run_command
    except SnugfitError as error:
        print(f"snugfit: {escape_controls(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    try:
        if RAISES:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command()
    except KeyboardInterrupt:  # before or after the command itself
        _end()


if __name__ == "__main__":
    main()
