"""A hook of mkdocs: links out of docs/ lead somewhere on the site, too.

Pages link to examples, results and the README by relative paths, which are right in the repository.
What they link to is put on the site below source/, and the links are rewritten.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

FOLDER = "source"
# [text](target), [text](target#anchor), ![text](target); not in code.
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def on_files(files, config):
    root = Path(config.config_file_path).parent
    pages = [page.src_uri for page in files.documentation_pages()]
    while pages:
        page = pages.pop()
        text = (root / in_repository(page)).read_text(encoding="utf-8")
        for target in set(LINK.findall("".join(CODE.split(text)[::2]))):
            uri = site_uri(page, target)
            path = root / in_repository(uri)
            outside = uri.startswith(f"{FOLDER}/") and path.is_file()
            if outside and not files.get_file_from_path(uri):
                file = File.generated(config, uri, abs_src_path=str(path))
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)
                pages += [uri] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri

    def rewrite(match):
        return posixpath.relpath(site_uri(here, match.group()), posixpath.dirname(here) or ".")

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts)


def in_repository(uri):
    """A path in the repository, of a file on the site."""
    prefix = f"{FOLDER}/"
    return uri.removeprefix(prefix) if uri.startswith(prefix) else f"docs/{uri}"


def site_uri(page, target):
    """Where on the site the target of a page's link is."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), target))
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{FOLDER}/{path}"
