"""figures/report.html: everything the committed rows say, on one page that needs no other file.

    python -m figures.report

Claims first, then the pictures over all studies, one section per folder of results/ (its table,
pictures, claims and where its rows come from) and the other reports. Tables sort by a click on
their head. Text is what results/*.md hold, so the page says nothing that they do not.
"""

import base64
import html
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from errors import exit_on_user_error, read_command_line


@dataclass(frozen=True)
class ReportConfig:
    """results/ and figures/ as one HTML page."""

    results: Path = Path("results")
    figures: Path = Path("figures")
    out: Path | None = None  # default: FIGURES/report.html


if __name__ == "__main__":  # before the imports that take a second
    exit_on_user_error(lambda: read_command_line(ReportConfig, __doc__))

from markdown_it import MarkdownIt

import files
from analysis.rows import load_rows

CAPTIONS = {
    "scale": "What each variant gains over doing nothing, against size.",
    "forest": "Every contrast that a claim names, at every scale; bars are 95 % intervals.",
    "epsilon": "SRIO's strength: loss minus nrio's against epsilon.",
    "gains": "The ratio of new gains to old ones, set alone.",
    "policies": "Attention policy against FFN policy.",
    "gradients": "Gradient RMS of new and old weights by layer, right after growth.",
    "staircase": "Repeated growth: loss against all training FLOPs.",
    "rotation": "The rotation in its plane: an old coordinate and its new partner.",
    "exactness": "Largest logit difference of every family and method.",
    "throughput": "Training tokens per second beside nanoGPT and transformers.",
    "loss_table": "Paired differences, with 95 % intervals.",
    "loss_curves": "Validation loss after growth.",
}
# markdown as GitHub shows it; raw HTML stays text, since a row may hold any name
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;
 style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Wider transformers: claims, tables, pictures</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 0 1rem 4rem;
  max-width: 75rem; color: #222; }
nav { columns: 14rem; margin: 1rem 0; }
nav a { display: block; }
a { color: #0072b2; }
h2 { border-top: 1px solid #ccc; padding-top: 1.5rem; margin-top: 3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #e2e2e2; text-align: left;
  vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 4rem; }
#claims td:nth-child(2) { min-width: 16rem; }
th { cursor: pointer; white-space: nowrap; background: #f5f5f5; }
th[aria-sort=ascending]::after { content: " \\25B2"; }
th[aria-sort=descending]::after { content: " \\25BC"; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; }
figcaption, .from { color: #555; font-size: 0.85rem; }
summary { cursor: pointer; margin: 1rem 0; font-weight: 600; }
code { overflow-wrap: anywhere; }
</style></head><body>
"""
SCRIPT = """<script>
function key(cell) {  // a number where the cell begins with one, else its text
  const text = cell.textContent.replace(/[,\\u2212]/g, c => c == ',' ? '' : '-').trim();
  const number = parseFloat(text);
  return isNaN(number) ? text : number;
}
function order(a, b) {  // numbers before text
  if (typeof a != typeof b) return typeof a == 'number' ? -1 : 1;
  return a < b ? -1 : a > b ? 1 : 0;
}
function sort(head) {
  const up = head.getAttribute('aria-sort') != 'ascending', i = head.cellIndex;
  const body = head.closest('table').tBodies[0];
  for (const other of head.parentNode.cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const rows = [...body.rows].map(row => [key(row.cells[i]), row]);
  rows.sort((a, b) => (up ? 1 : -1) * order(a[0], b[0]));
  for (const [, row] of rows) body.append(row);
}
for (const head of document.querySelectorAll('th')) {
  head.tabIndex = 0;
  head.onclick = () => sort(head);
  head.onkeydown = event => { if (event.key == 'Enter') sort(head); };
}
</script>
</body></html>
"""


def page(results: Path, figures: Path) -> str:
    """The whole page; nothing in it depends on the time."""
    studies = [path.parent for path in sorted(results.glob("*/rows"))]
    others = {path.stem: [path] for path in sorted(results.glob("*.md")) if path.stem != "claims"}
    for path in sorted(results.glob("*/*.md")):  # reports without rows
        if path.parent not in studies:
            others.setdefault(path.parent.name, []).append(path)
    names = map(html.escape, ["claims", *(folder.name for folder in studies), *others])
    links = "".join(f'<a href="#{name}">{name}</a>' for name in names)
    return "".join(
        [
            HEAD,
            "<h1>Wider transformers</h1><p>Made by <code>python -m figures.report</code> from the "
            "committed rows; losses in nats per token. Click a column's head to sort.</p>",
            f"<nav>{links}</nav>",
            f'<section id="claims">{claims(results / "claims.md")}</section>',
            *(picture(path) for path in sorted(figures.glob("*.svg"))),
            *(study(folder, figures / folder.name) for folder in studies),
            *(section(name, "".join(map(folded, paths))) for name, paths in others.items()),
            SCRIPT,
        ]
    )


def claims(path: Path) -> str:
    """The table of claims; what follows it, scale by scale, folded away."""
    table, mark, rest = document(path).partition("<h4>")
    more = f"<details><summary>Every claim at every scale</summary>{mark}{rest}</details>"
    return table + more if mark else table


def study(folder: Path, figures: Path) -> str:
    """One folder of results: provenance, pictures, table, and its claims folded away."""
    parts = [provenance(load_rows(folder)), *map(picture, sorted(figures.glob("*.svg")))]
    parts += [document(folder / "table.md")]
    parts += [folded(path) for path in sorted(folder.glob("*.md")) if path.stem != "table"]
    return section(folder.name, "".join(parts))


def section(name: str, content: str) -> str:
    name = html.escape(name)
    return f'<section id="{name}"><h2>{name}</h2>{content}</section>'


def provenance(rows: list[dict]) -> str:
    """Commands, commits, machines and corpora of the rows, each with how many rows it has."""

    def counted(values: list[str]) -> str:
        return "; ".join(
            f"<code>{html.escape(value)}</code> ({n})" for value, n in Counter(values).most_common()
        )

    machines = [f"{row['hardware'].get('cpu') or row['hardware'].get('gpu')}, "
                f"{row['hardware'].get('threads')} threads, torch {row['versions']['torch']}"
                for row in rows]  # fmt: skip
    return (
        f'<p class="from">{len(rows)} rows. Command: {counted([str(r["command"]) for r in rows])}. '
        f"Commit: {counted([str(r['commit'])[:10] for r in rows])}. Machine: {counted(machines)}. "
        f"Corpus: {counted([str(r['corpus'].get('source')) for r in rows])}.</p>"
    )


def document(path: Path) -> str:
    """A markdown file as HTML: headings two levels down, tables that scroll by themselves."""
    text = MARKDOWN.render(path.read_text()) if path.is_file() else ""
    text = re.sub(r"<(/?)h([1-4])>", lambda m: f"<{m[1]}h{int(m[2]) + 2}>", text)
    text = text.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )
    return re.sub(r'href="([\w-]+)(?:/claims|/table)?\.md"', r'href="#\1"', text)


def folded(path: Path) -> str:
    return f"<details><summary>{html.escape(path.name)}</summary>{document(path)}</details>"


def picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    caption = html.escape(CAPTIONS.get(path.stem, path.stem))
    return (
        f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def main() -> None:
    cfg = read_command_line(ReportConfig, __doc__)
    out = cfg.out or cfg.figures / "report.html"
    files.write_text(out, page(cfg.results, cfg.figures))
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    exit_on_user_error(main)
