"""User errors: one line that names the value, the allowed range and the remedy; exit code 2."""

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS)
NO_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


class UserError(Exception):
    """Something the user can mend. The message is one line: value, allowed range, remedy."""


def exit_on_user_error(main: Callable[[], object]) -> None:
    """Run `main`; a UserError, a full disk or an unusable path becomes one line, exit 2."""
    if hasattr(sys.stdout, "reconfigure"):  # a name that is no Unicode can still be printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    except UserError as error:
        sys.exit(_fail(str(error)))
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # what Path.resolve raises before 3.13
            raise
        sys.exit(_fail(f"{error}; choose another path"))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output (`| head`) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        remedies = dict.fromkeys(NO_SPACE, "free space or choose another disk")
        remedies |= dict.fromkeys(REFUSED, "choose a place that this user may read and write")
        remedies |= dict.fromkeys(NO_PATH, "choose another path")
        if error.errno not in remedies:  # not the user's to mend: a bug, with its traceback
            raise
        place = error.filename2 or error.filename or "output"
        sys.exit(_fail(f"{error.strerror}: {place}; {remedies[error.errno]}"))


def read_command_line(config: type, description: str | None):
    """The command line as a `config`, read by tyro, whose box of several lines for an option that
    is unknown, missing or unreadable becomes a UserError."""
    import tyro

    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(config, description=description)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
    raise UserError(f"{_unboxed(box.getvalue())}; see --help")


def _unboxed(box: str) -> str:
    """What tyro's box says above its first rule, and the first option that it suggests."""
    said, _, more = "\n".join(re.findall(r"^│ (.*) │$", box, re.MULTILINE)).partition("───")
    choices = re.search(r"(.*)\. Expected one of \((.*)\)\.$", " ".join(said.split()))
    if choices:
        return f"{choices[1]}; choose one of {choices[2].replace(chr(39), '')}"
    likely = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", more)
    return said.strip() + (f" (perhaps {likely[1]}?)" if likely else "")


def _fail(message: str) -> int:
    text = " ".join(message.split())
    text = text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 100]} ... {text[-90:]}"
    print(f"error: {text}", file=sys.stderr, flush=True)
    return 2


MAX_CHARS = 1200  # a line that is still read; absurd values are cut in the middle
