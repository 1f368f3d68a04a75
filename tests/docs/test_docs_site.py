"""Links between pages lead somewhere, in the repository and on the site; the nav has every page."""

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = ROOT / "mkdocs.yml"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

pytestmark = pytest.mark.skipif(not CONFIG.is_file(), reason="no docs")


def prose(page):
    """A page's text without its code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(page):
    """Of its headings: those that GitHub and Python-Markdown make alike."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    titles = [title.replace("`", "") for title in re.findall(r"^#+ (.+)$", text, re.M)]
    github = [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]
    site = []
    for title in titles:
        ascii_only = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        site.append(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower()))
    return set(github) & set(site)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.is_file(), target  # a folder has no page on the site
        assert file.resolve().is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_can_be_reached_from_the_readme():
    """But those of the API, which only the site has."""
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^):#\s]+\.md)", prose(page))
        ahead += {(page.parent / link).resolve() for link in links} - reached
    api = set((DOCS / "api").glob("*.md"))
    assert set(DOCS.rglob("*.md")) - api - reached == {DOCS / "index.md"}


def test_every_page_is_in_the_nav_once():
    lines = CONFIG.read_text(encoding="utf-8").splitlines()
    start = lines.index("nav:") + 1
    end = next(n for n, line in enumerate(lines) if n > start and re.match(r"\w", line))
    entries = (re.match(r" *- [^#]*?(\S+\.md)", line) for line in lines[start:end])
    pages = (page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(entry[1] for entry in entries if entry) == sorted(pages)


def words(text):
    """Those of a page's prose: not of code, of what benchmarks write, of the targets of links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    text = re.sub(r"<!-- (\S+):begin -->.*?<!-- \1:end -->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(any(map(str.isalpha, word)) for word in text.split())


def test_there_is_not_more_to_read_than_somebody_reads():
    assert words("One [link](to/a_page.md),\n| `code` | 2 |\n```python\nx\n```\n") == 3
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    counts = {str(page.relative_to(ROOT)): words(page.read_text("utf-8")) for page in pages}
    count = sum(counts.values())
    assert count > 10_000, "most of the prose is not counted"
    longest = sorted(counts, key=counts.get, reverse=True)[:5]
    assert count <= 20_000, f"{count} words; the longest pages: {longest}"


def test_every_public_name_has_a_place():
    import memsave_ext

    documented = {
        name
        for page in (DOCS / "api").glob("*.md")
        for module in re.findall(r"^::: ([a-z_.]+)$", page.read_text(encoding="utf-8"), re.M)
        if ".integrations." not in module  # each imports a library
        for name in getattr(__import__(module, fromlist=["_"]), "__all__", ())
    }
    left_out = set(memsave_ext.__all__) - documented
    assert left_out == {"__version__", "integrations", "memory"}  # a string, and pages of their own
