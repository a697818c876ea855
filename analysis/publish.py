"""Rows to committed results: tables, claims and pictures of a folder; publishing into results/."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import files
from analysis.rows import NAME, check_case, load_rows, matched, row_path, row_text
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def summarize(folder: Path, pictures: Path | None = None, allow_missing: bool = False) -> None:
    """Table and claims of the rows in `folder`, written beside them; the table printed; pictures,
    into figures/ under the folder's name where no other place is given."""
    pictures = pictures or ROOT / "figures" / published_name(folder)
    rows = load_rows(folder)
    write_results(rows, folder, allow_missing)
    draw(rows, pictures, allow_missing)


def publish(out: Path) -> None:
    """Put the rows of `out` into results/, where they are committed, under the folder's name, with
    table and claims; pictures into figures/. Rows that are there and not in `out` are kept.

    All is checked first; what then takes the place of results/NAME is whole.
    """
    name, rows = published_name(out), {row["run_id"]: row for row in load_rows(out)}
    matched(list(rows.values()))
    target = ROOT / "results" / name
    with files.lock(target.with_name(".lock"), f"results/{name}", wait_s=60):
        there = load_rows(target) if (target / "rows").is_dir() else []
        kept = [row for row in there if row["run_id"] not in rows]
        check_published(name, out, [*rows.values()], there)
        check_case([name, *(path.name for path in target.parent.iterdir())])
        check_case([*rows, *(row["run_id"] for row in kept)])
        matched([*rows.values(), *kept], allow_missing=True)
        print(f"results/{name}: {len(rows)} rows from {out}, {len(kept)} more kept")
        with files.new_folder(target, replace=True) as tmp:
            if target.exists():
                shutil.copytree(target, tmp, dirs_exist_ok=True)
            (tmp / "rows").mkdir(exist_ok=True)
            for row in rows.values():  # new_folder brings all of them to the disk at once
                row["command"] = without_places(str(row.get("command", "")), name)
                with files.naming(row_path(target, row["run_id"])):
                    row_path(tmp, row["run_id"]).write_bytes((row_text(row) + "\n").encode())
            write_results([*rows.values(), *kept], tmp, allow_missing=bool(kept))
        draw([*rows.values(), *kept], ROOT / "figures" / name, allow_missing=bool(kept))


def published_name(folder: Path) -> str:
    """The name that `folder` gives to its results and pictures; UserError where it is unfit."""
    name = Path(folder).resolve().name
    if not NAME.fullmatch(name):
        raise UserError(
            f"{str(folder)!r} ends in {name!r}, which would name folders in results/ and figures/: "
            "rename it to 1 to 150 letters, digits or .,:=@+-_"
        )
    return name


def check_published(name: str, out: Path, rows: list[dict], there: list[dict]) -> None:
    """Rows of another preset or corpus are never replaced: they are somebody's other results."""
    for what in ("preset", "manifest_hash"):
        old, new = {row[what] for row in there}, {row[what] for row in rows}
        if old and old != new:
            shown = [", ".join(sorted(values))[:60] for values in (old, new)]
            raise UserError(
                f"results/{name} holds rows of {what} {shown[0]}, {out} of {shown[1]}; "
                f"rename {out}, or delete results/{name} first"
            )


def without_places(command: str, name: str) -> str:
    """The command with folders' own names, not where they lay on this machine."""
    try:
        words = shlex.split(re.sub(r"(--out|--corpora|--parent)=", r"\1 ", command))
    except ValueError:  # unbalanced quotes: not written by this program
        return command
    for option in {"--out", "--corpora", "--parent"} & set(words[:-1]):
        at = words.index(option) + 1
        words[at] = f"runs/{name}" if option == "--out" else Path(words[at]).name
    return shlex.join(words)


def write_results(rows: list[dict], folder: Path, allow_missing: bool) -> None:
    """table.csv, table.md and claims.md (for a given parent, its verdict), each computed before the
    first is written; the table printed."""
    from analysis import aggregate  # pandas and scipy take a second; refusals need neither
    from analysis.claims import claims
    from analysis.pretrained import verdict

    df = aggregate.table(rows, allow_missing=allow_missing)
    text = claims(rows, allow_missing) + verdict(rows)
    aggregate.write_table(df, folder)
    files.write_text(folder / "claims.md", text)
    aggregate.print_table(df)


def draw(rows: list[dict], pictures: Path, allow_missing: bool) -> None:
    """The pictures. Whatever goes wrong with them is said, and costs nothing else."""
    try:
        from figures import loss_curves, loss_table

        for figure in (loss_curves, loss_table):
            for path in figure.draw(rows, pictures, allow_missing=allow_missing):
                print(f"wrote {path}")
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        print(f"warning: no pictures: {kind}{error}; the table is whole", file=sys.stderr)
