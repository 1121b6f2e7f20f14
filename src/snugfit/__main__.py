"""Entry point of the command `snugfit`: plugins load before the modules that use features."""

from __future__ import annotations

import sys

from snugfit.cli.plugins import named_plugins
from snugfit.errors import SnugfitError, escape_controls
from snugfit.feature_folders import use_plugins


def main() -> None:
    """Load the plugins of the command line, and run it. This is the console entry point."""
    try:
        use_plugins(named_plugins(sys.argv[1:]))
        from snugfit.cli.main import main as run_command
    except SnugfitError as error:
        print(f"snugfit: {escape_controls(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # during the imports
        print("snugfit: interrupted", file=sys.stderr)
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
