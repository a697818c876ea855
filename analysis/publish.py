"""Rows to committed results: tables, claims and pictures of a folder; publishing into results/."""

import re
from pathlib import Path

import files
from analysis.rows import load_rows, matched, row_path, write_row

ROOT = Path(__file__).resolve().parents[1]


def summarize(folder: Path, pictures: Path, allow_missing: bool = False) -> None:
    """Table and claims of the rows in `folder`, written beside them; the table printed; figures."""
    from analysis import aggregate  # pandas, scipy and matplotlib take a second; a refusal
    from analysis.claims import claims  # of run_ablations.py needs none of them
    from analysis.pretrained import verdict
    from figures import loss_curves, loss_table

    rows = load_rows(folder)
    df = aggregate.table(rows, allow_missing=allow_missing)
    aggregate.write_table(df, folder)
    files.write_text(folder / "claims.md", claims(rows, allow_missing) + verdict(rows))
    aggregate.print_table(df)
    for figure in (loss_curves, loss_table):
        for path in figure.draw(rows, pictures, allow_missing=allow_missing):
            print(f"wrote {path}")


def publish(out: Path, name: str) -> None:
    """Copy rows to results/NAME, where they are committed, and make its tables and figures."""
    target, rows = ROOT / "results" / name, {row["run_id"]: row for row in load_rows(out)}
    there = load_rows(target) if (target / "rows").is_dir() else []
    kept = [row for row in there if row["run_id"] not in rows]
    matched([*rows.values(), *kept], allow_missing=True)  # refuses before anything is replaced
    print(f"results/{name}: {len(rows)} rows from {out}, {len(kept)} more kept")
    for row in rows.values():
        # folders' own names, not where they lay on this machine
        row["command"] = re.sub(r"--out[ =]\S+", f"--out runs/{name}", row["command"])
        row["command"] = re.sub(r"(--parent|--corpora)[ =]\S*?([^/\s]+)/?(?=\s|$)", r"\1 \2",
                                row["command"])  # fmt: skip
        write_row(row_path(target, row["run_id"]), row)
    summarize(target, ROOT / "figures" / name, allow_missing=bool(kept))
