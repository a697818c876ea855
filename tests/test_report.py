"""figures/report.html, opened in a real browser where one is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from analysis import aggregate, overview
from figures.report import document, page
from tests.synthetic_rows import grid, row, write

ROOT = Path(__file__).parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
browser = pytest.mark.skipif(not BROWSER, reason="no Chromium; `make browser` installs it (root)")
HOSTILE = "python <script>document.title = 'run'</script> <img src=x onerror=alert(1)> & [a](b)"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """A page over one folder of made-up rows, one with a hostile command."""
    place = tmp_path_factory.mktemp("report")
    rows = [*grid(seeds=range(5)), row("srio", 5) | {"command": HOSTILE}]
    write(rows, place / "results" / "made-up")
    df = aggregate.table(rows, allow_missing=True)
    aggregate.write_table(df, place / "results" / "made-up")
    lines, studies = overview.lines_of(place / "results"), overview.studies(place / "results")
    (place / "results" / "claims.md").write_text(overview.page(lines, studies))
    (place / "results" / "alone").mkdir()  # a report without rows
    (place / "results" / "alone" / "a&b.md").write_text("# Gains\n")
    pictures = place / "figures" / "made-up"
    pictures.mkdir(parents=True)
    shutil.copy(ROOT / "figures" / "rotation.svg", pictures.parent)
    shutil.copy(ROOT / "figures" / "rotation.svg", pictures / "loss_curves.svg")
    (place / "report.html").write_text(page(place / "results", place / "figures"))
    return place / "report.html"


def opened(report: Path, script: str) -> str:
    """The page's HTML after `script` has run in it, in a window as narrow as Chromium has."""
    copy = report.with_name("opened.html")
    copy.write_text(report.read_text().replace("</body>", f"<script>{script}</script></body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,900"]
    command += [f"--user-data-dir={report.parent / 'profile'}", "--dump-dom", copy.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_page_needs_no_other_file_and_runs_nothing_from_a_row(report):
    text = report.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#)(?!\.\./|\w+/)', text)
    assert text.count("<script>") == 1 and "onerror=alert" in text and "<img src=x" not in text
    assert "&lt;script&gt;" in text and text.count("data:image/svg+xml") == 2
    assert "a&amp;b.md" in text and "<h3>Gains</h3>" in text
    for name in ("claims", "made-up", "alone"):
        assert f'href="#{name}"' in text and f'id="{name}"' in text


def test_links_between_reports_stay_on_the_page(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("# A\n\n[t](tiny-all/claims.md) [e](exactness.md) [x](../figures/x.png)\n")
    text = document(path)
    assert 'href="#tiny-all"' in text and 'href="#exactness"' in text and "<h3>A</h3>" in text
    assert 'href="../figures/x.png"' in text


@browser
def test_a_click_sorts_numbers_as_numbers_and_a_second_one_turns_them_round(report):
    script = """
    const table = document.querySelector('#made-up table'), i = 2;
    const column = () => [...table.tBodies[0].rows].map(row => row.cells[i].textContent);
    const head = table.tHead.rows[0].cells[i];
    head.click(); const up = column(); head.click(); const down = column();
    document.title = JSON.stringify([head.getAttribute('aria-sort'), up, down]);
    """
    title = re.search(r"<title>(.*?)</title>", opened(report, script))[1]
    state, up, down = json.loads(title)
    values = [float(re.match(r"-?[\d.]+", cell)[0]) for cell in up if re.match(r"-?\d", cell)]
    assert state == "descending" and len(values) > 5
    assert values == sorted(values) and down == up[::-1]


@browser
def test_a_phone_scrolls_the_tables_and_not_the_page(report):
    script = """
    const wide = [...document.querySelectorAll('.wide')].some(e => e.scrollWidth > e.clientWidth);
    const page = document.documentElement;
    document.title = [page.scrollWidth <= page.clientWidth, wide,
      [...document.images].every(image => image.complete && image.naturalWidth > 0)];
    """
    assert "<title>true,true,true</title>" in opened(report, script)
