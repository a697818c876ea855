"""User errors: one line that names the value, the allowed range and the remedy; exit code 2."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Something the user can mend. The message is one line: value, allowed range, remedy."""


def exit_on_user_error(main: Callable[[], object]) -> None:
    """Run `main`; a UserError, a full disk or a refused permission becomes one line and exit 2."""
    try:
        main()
    except UserError as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        # no space left, read-only folder, permission, quota: the user's to mend, not a bug
        if error.errno not in (1, 13, 27, 28, 30, 122):
            raise
        sys.exit(
            _fail(f"{error.strerror}: {error.filename or 'output'}; free space or choose --out")
        )


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return 2
