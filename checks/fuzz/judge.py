"""One bad input, one process, one verdict: refused in one useful line, ran correctly, or a fault.

Each case runs in a fork of this process, which has everything imported already, with the limits of
the kernel on CPU time and memory, and under an audit hook that sees every file it opens for
writing, every folder it makes and every class that a pickle asks for. The same case can run as a
real command instead, without limits; then imports count, too.
"""

import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from tqdm import tqdm

from errors import exit_on_user_error

ROOT = Path(__file__).resolve().parents[2]
CPU_S = 5  # seconds of CPU time a case may take
MEMORY_MB = 1000  # a case may allocate on top of what its imports hold
WALL_S = 300  # for a case that sleeps instead of working; beside others one may wait for its turn
MAX_LINE = 1300  # characters of an error line
IGNORED = ("run/lock",)  # says who holds the folder; every start renews it


@dataclass(frozen=True)
class Case:
    """A bad input. `make` writes it into the case's own empty folder, where `call` then runs.

    call: "train:main" with arguments as a command line, or "module:function" with one path.
    blames: the error line must hold one of these. check: raises where a run that ended well ended
    wrong; None: the input must be refused. writes: what a good run may write. env, words: changes
    of the environment (None: unset) and what stands before the command; it is then always a real
    one.
    """

    group: str
    name: str
    call: str
    arguments: tuple[str, ...]
    blames: tuple[str, ...]
    make: Callable[[Path], object] = lambda folder: None
    check: Callable[[Path], object] | None = None
    writes: tuple[str, ...] = ()
    env: tuple[tuple[str, str | None], ...] = ()
    words: tuple[str, ...] = ()

    @property
    def is_command(self) -> bool:
        return self.call.endswith(":main")

    def but(self, about: object, **changes) -> "Case":
        """The same with something bad, which `about` says."""
        return replace(self, name=f"{self.name}: {about}", **changes)


Cases = st.SearchStrategy[Case]


def command(
    group: str, program: str, arguments: tuple[str, ...], blames: tuple[str, ...], **more
) -> Case:
    """`program` as a command line; its name says nothing yet of what is bad."""
    return Case(group, program, f"{program}:main", arguments, blames, **more)


@dataclass(frozen=True)
class Verdict:
    """How a case ended. fault: "" or what is wrong; line: what the user read."""

    group: str
    name: str
    outcome: str  # refused | ran
    line: str
    cpu_s: float
    memory_mb: int  # on top of what the process held when the case began
    fault: str


def judge(case: Case, place: Path, real: bool = False) -> Verdict:
    """Run `case` in the new folder `place`/case, with its notes beside it; both are removed."""
    folder, notes, scratch = place / "case", place / "notes", place / "tmp"
    real = real or bool(case.env or case.words)
    for path in (folder, notes, scratch):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    case.make(folder)
    before = listing(folder)
    code, usage = start(case, folder, notes, real)
    after, held_kb = listing(folder), int((notes / "held_kb").read_text())
    memory_mb = round((usage.ru_maxrss - held_kb) / 1024)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    said = on_screen((notes / "stderr").read_bytes().decode(errors="backslashreplace"))
    found = faults(case, code, said, changed.difference(IGNORED), folder)
    fault = next(found, "") or (notes / "audit").read_text().partition("\n")[0]
    if not fault and code and any(scratch.iterdir()):
        fault = "left temporary files"
    if not fault and memory_mb > MEMORY_MB and not real:
        fault = f"allocated {memory_mb} MB"
    line = said.splitlines()[-1] if said and code else ""
    for text in (str(folder), str(place), place.name.replace("_", "-")):  # as a corpus is named
        line = line.replace(text, "...")
    shutil.rmtree(folder)
    cpu_s, outcome = round(usage.ru_utime + usage.ru_stime, 2), "refused" if code else "ran"
    return Verdict(case.group, case.name, outcome, line, cpu_s, memory_mb, fault)


def on_screen(text: str) -> str:
    """What a terminal shows in the end: progress bars that were cleared are gone."""
    lines = (line.rstrip("\r").split("\r")[-1] for line in text.split("\n"))
    return "\n".join(line for line in lines if line.strip())


def faults(case: Case, code: int, said: str, changed: set[str], folder: Path) -> Iterator[str]:
    """What is wrong with an exit code, the lines on the screen, the files and the result."""
    lines = said.splitlines()
    if code == -signal.SIGXCPU:
        yield f"took more than {CPU_S} s of CPU time"
    elif code < 0:
        yield f"killed by {signal.Signals(-code).name}"
    elif code not in (0, 2):
        yield f"exit {code}: {lines[-1][:200] if lines else ''}"
    elif code == 0 and case.check is None:
        yield "was accepted"
    elif code and (len(lines) != 1 or not said.startswith("error: ")):
        yield f"{len(lines)} lines instead of one that starts with 'error: ': {lines[:3]}"
    elif code and len(said) > MAX_LINE:
        yield f"a line of {len(said)} characters"
    elif code and not any(blame.lower() in said.lower() for blame in case.blames):
        yield f"the line names none of {', '.join(case.blames)}"
    may = () if code else case.writes
    if wrong := sorted(n for n in changed if not any(f"{n}/".startswith(f"{w}/") for w in may)):
        yield f"{'refused' if code else 'ran'}, but wrote or changed {', '.join(wrong[:3])}"
    try:
        with chdir(folder):
            code or case.check(folder)
    except Exception as error:  # noqa: BLE001 - any is a verdict
        yield f"ended wrong: {type(error).__name__}: {error}"


def listing(folder: Path) -> dict[str, object]:
    """What lies below a folder: name -> what identifies it."""

    def content(path: Path) -> object:
        if path.is_symlink():
            return os.readlink(path)
        return hash(path.read_bytes()) if path.is_file() else "folder"

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


# ---- the case's own process


def start(case: Case, folder: Path, notes: Path, real: bool):
    """(exit code, < 0: the signal; resource usage) of the case in a child of this process."""
    (notes / "audit").touch()
    pid = os.fork()
    if pid == 0:
        code = 70
        os.setsid()  # with all that it starts, it can be ended
        try:
            redirect(notes)
            os.chdir(folder)
            os.environ["TMPDIR"] = tempfile.tempdir = str(notes.with_name("tmp"))
            signal.alarm(WALL_S)
            code = become(case) if real else in_child(case, folder, notes)
        except BaseException:  # noqa: BLE001 - a traceback is what the judge looks for
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status), usage


def redirect(notes: Path) -> None:
    """stdout and stderr into files; what this process holds, for the judge."""
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        os.dup2(os.open(notes / name, os.O_CREAT | os.O_WRONLY), number)
        setattr(sys, name, open(number, "w", encoding="utf-8", errors=errors, closefd=False))
    (notes / "held_kb").write_text(str(held_bytes(MEMORY) // 1024))


ADDRESS_SPACE, MEMORY = 0, 1  # columns of statm


def held_bytes(column: int) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[column])
    return pages * resource.getpagesize()


def become(case: Case) -> int:
    """The real command in place of this process."""
    words = [*case.words, sys.executable, "-m", case.call.split(":")[0], *case.arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | dict(case.env)
    os.execvpe(words[0], words, {name: value for name, value in env.items() if value is not None})


def in_child(case: Case, folder: Path, notes: Path) -> int:
    """Run the case here, until the kernel ends it at CPU_S; its exit code."""
    tqdm._instances.clear()  # this process's own bars are not the case's
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    # address space is reserved in larger pieces than are used (threads, memory maps)
    most = held_bytes(ADDRESS_SPACE) + 2 * MEMORY_MB * 10**6
    limits = {resource.RLIMIT_CPU: (CPU_S, CPU_S + 1), resource.RLIMIT_CORE: (0, 0)}
    for what, pair in (limits | {resource.RLIMIT_AS: (most, most)}).items():
        resource.setrlimit(what, pair)
    watch(folder, notes / "audit")
    module, function = case.call.split(":")
    run = getattr(importlib.import_module(module), function)
    sys.argv = [f"{module.replace('.', '/')}.py", *case.arguments]
    given = () if case.is_command else (Path(case.arguments[0]),)
    try:
        exit_on_user_error(lambda: run(*given))
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


CHANGES = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.truncate")


def watch(folder: Path, log: Path) -> None:
    """From now on, note every write outside `folder` and every class a pickle asks for."""
    inside = (f"{folder}/", f"{tempfile.gettempdir()}/", os.devnull, str(log))
    inside += ("/proc",)  # nobody can write there
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def note(text: str) -> None:
        with open(log, "a", errors="backslashreplace") as file:
            file.write(f"{text}\n")

    def hook(event: str, given: tuple) -> None:
        if event == "pickle.find_class":
            return note(f"unpickled {given[0]}.{given[1]}")
        if event == "open":
            path, _, flags = given
            wrote = isinstance(flags, int) and flags & writing
        else:
            path, wrote = given[0] if given else "", event in CHANGES
        if wrote and isinstance(path, (str, bytes)):
            path = os.path.abspath(os.path.join(folder, os.fsdecode(path)))
            if path != str(folder) and not path.startswith(inside):
                note(f"{event} outside of its folder: {path}")

    sys.addaudithook(hook)
