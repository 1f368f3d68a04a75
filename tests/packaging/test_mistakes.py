"""The mistakes that `make mistakes` switches on fit the sources. Whether tests see them it says
itself, in minutes."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mistakes"))
from mistakes import MISTAKES  # noqa: E402
from switch import VARIABLE, with_mistakes  # noqa: E402

pytestmark = pytest.mark.once


def changed():
    return with_mistakes(MISTAKES, lambda name: (ROOT / name).read_text("utf-8"), "is({number})")


def test_each_is_in_its_file():
    """What is right occurs there once, so that who changes the line carries the mistake on."""
    texts = changed()
    for number, mistake in enumerate(MISTAKES):
        text = texts[mistake.file]
        switch = f'"{VARIABLE}") == "{number}"' if mistake.file.endswith(".py") else f"is({number})"
        assert text.count(switch) == mistake.wrong.count("MISTAKE") == 1, mistake.what


def test_python_is_valid_with_them():
    files = {name: text for name, text in changed().items() if name.endswith(".py")}
    assert files
    for name, text in files.items():
        compile(text, name, "exec")


def test_their_tests_exist():
    for mistake in MISTAKES:
        for test in mistake.tests:
            file, _, names = test.partition("::")
            text = (ROOT / "tests" / file).read_text("utf-8")
            if names:
                function = names.split("[")[0].split("::")[-1]
                assert f"def {function}(" in text, f"{mistake.what}: {test}"


def test_every_room_has_some():
    """But for csrc/plan, whose numbers have programs of their own that are compared."""
    rooms = {Path(mistake.file).parts[1] for mistake in MISTAKES}
    folders = {
        path.name for path in (ROOT / "memsave_ext").iterdir() if (path / "__init__.py").exists()
    }
    without = {"check"}  # says of a build what tests say
    assert folders - rooms == without
