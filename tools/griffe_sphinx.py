"""An extension of griffe: Sphinx's markup in docstrings, as the Markdown of the API pages.

Roles become code, and links to what has a place on the site; what follows a `::` becomes a block of
code.
"""

import re
import textwrap

import griffe

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")
BLOCK = re.compile(r"^(?P<text>.*?):(?P<colon>:)\n\n(?P<code>(?:[ \t]+.*\n|\n)+)", re.MULTILINE)


class SphinxMarkup(griffe.Extension):
    def on_package(self, *, pkg, **kwargs):
        convert(pkg)


def convert(item):
    if item.docstring is not None:
        item.docstring.value = markdown(item.docstring.value, item)
    for member in item.members.values():
        if not member.is_alias:
            convert(member)


def markdown(text, item):
    def link(match):
        short, name = match.groups()
        shown = f"`{name.rpartition('.')[2] if short else name}`"
        try:
            target = item.resolve(name)
        except griffe.NameResolutionError:
            return shown
        return f'<autoref optional identifier="{target}">{shown}</autoref>'

    def fence(match):
        code = match["code"]
        indent = re.match(r"[ \t]*", match["text"])[0]
        block = textwrap.indent(f"```python\n{textwrap.dedent(code).strip()}\n```", indent)
        return f"{match['text']}:\n\n{block}\n\n"

    return BLOCK.sub(fence, ROLE.sub(link, text + "\n"))
