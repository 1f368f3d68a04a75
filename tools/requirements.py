"""Prints what the extras of pyproject.toml require, one a line: to install without building.

python tools/requirements.py test lint | pip install -r /dev/stdin
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    known = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if not extras or not set(extras) <= known.keys():
        sys.exit(f"requirements.py: extras of {', '.join(known)}, got {' '.join(extras) or 'none'}")
    return list(dict.fromkeys(line for extra in extras for line in known[extra]))


if __name__ == "__main__":
    print(*requirements(sys.argv[1:]), sep="\n")
