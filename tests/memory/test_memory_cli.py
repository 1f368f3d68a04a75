"""``python -m memsave_ext.memory``: what it finds, writes and says."""

import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from memsave_ext import _native
from memsave_ext.memory import __main__ as command
from memsave_ext.memory import subjects

ROOT = Path(__file__).resolve().parents[2]

DEMO = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 8, bias=False))
    criterion = nn.CrossEntropyLoss()  # a module, and no model
    first = model[0]  # nor is a part of it
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(32, 64), torch.zeros(32, dtype=torch.long)
    calls = 0


    def train_step():
        global calls
        calls += 1
        print("call", calls)
        loss = criterion(model[1:](first(x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


    kept = []


    def leaks():
        loss = criterion(model(torch.randn(32, 64)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.detach())


    def variant():
        calls = []

        def step():
            calls.append(torch.empty(1000, dtype=torch.uint8))
            print("call", len(calls))

        return nn.Linear(10, 10, bias=False), None, step


    def fails():
        raise ArithmeticError("the user's own")


    def needs(batch):
        pass


    class Trainer:
        def __init__(self):
            self.net = model
            self.optimizer = optimizer

        def step(self):
            train_step()


    trainer = Trainer()
    number = 3
"""
PARAMETERS = (64 * 256 + 256 * 8) * 4


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """A module of its own name for each test, in the current directory."""
    name = f"demo_{len(sys.modules)}_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(DEMO))
    (tmp_path / f"{name}_fails.py").write_text("import not_installed_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["memsave_ext.memory"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    for module in [m for m in sys.modules if m.startswith(name)]:
        del sys.modules[module]


def run(*arguments):
    return command.main([str(argument) for argument in arguments])


# a run


@pytest.mark.skipif(not _native.available, reason="the tests below run it in pure Python, too")
def test_as_a_program(tmp_path):
    """In a process of its own, from a directory that is not on Python's path."""
    (tmp_path / "demo_module.py").write_text(textwrap.dedent(DEMO))
    done = subprocess.run(
        [sys.executable, "-m", "memsave_ext.memory", "demo_module:train_step", "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("call") == 3
    assert "Peak" in done.stdout and "parameters" in done.stdout
    out = tmp_path / "memory-profile"
    document = json.loads((out / "timeline.json").read_text())
    assert document["at_peak"]["parameters"] == PARAMETERS
    assert document["at_peak"]["optimizer"] >= 2 * PARAMETERS
    assert "Peak" in (out / "report.txt").read_text()
    assert str(document["device"]) == "cpu"


def test_files_and_steps(demo, tmp_path, capsys):
    assert run(f"{demo}:train_step", "--steps", 4, "--warmup", 3, "--out", "a/b") == 0
    printed = capsys.readouterr()
    assert printed.out.count("call") == 3 + 4
    document = json.loads((tmp_path / "a/b/timeline.json").read_text())
    rows = zip(*document["timeline"]["live"].values(), strict=True)
    assert max(map(sum, rows)) == document["peak"]
    assert [step["index"] for step in document["steps"]] == [0, 1, 2, 3]
    report = (tmp_path / "a/b/report.txt").read_text()
    assert report.splitlines()[0] in printed.out
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "a/b/timeline.png").read_bytes().startswith(b"\x89PNG")
        assert "wrote report.txt, timeline.json, timeline.png to a/b" in printed.err


def test_what_grows_and_what_would_help_are_told(demo, tmp_path, monkeypatch, capsys):
    gc.unfreeze()  # conftest.py sets aside what is there, which no search finds then
    monkeypatch.setattr(command.Track, "remedies", lambda self: ["This would help."])
    assert run(f"{demo}:leaks", "--steps", 6, "--out", tmp_path) == 0
    for text in (capsys.readouterr().out, (tmp_path / "report.txt").read_text()):
        assert f"ofthemodule{demo}" in "".join(text.split())  # a column has lines
        assert "This would help." in text


def test_a_function_that_builds_a_variant(demo, tmp_path, capsys):
    assert run(f"{demo}:variant", "--steps", 2, "--warmup", 3, "--out", tmp_path) == 0
    assert capsys.readouterr().out.count("call") == 5
    document = json.loads((tmp_path / "timeline.json").read_text())
    assert document["at_peak"]["parameters"] == 400
    assert document["peak"] == 400 + 2000


def test_the_model_that_is_meant_and_its_lines(demo, tmp_path, capsys):
    code = f"""
        import torch
        from {demo} import model

        teacher = torch.nn.Linear(64, 8)
        x = torch.randn(1000, 64)

        def distill():
            (model(x) - teacher(x).detach()).square().sum().backward()
    """
    (tmp_path / f"{demo}_two.py").write_text(textwrap.dedent(code))
    assert run(f"{demo}_two:distill") == 2
    assert "uses several models, model (Sequential), teacher (Linear)" in capsys.readouterr().err
    chosen = "--model", f"{demo}_two:model", "--stacks", "--out", tmp_path
    assert run(f"{demo}_two:distill", "--steps", 1, *chosen) == 0
    document = json.loads((tmp_path / "timeline.json").read_text())
    assert document["at_peak"]["parameters"] == PARAMETERS
    largest = document["top"][0]  # of 1000 x 256 floats
    assert largest["bytes"] == 1000 * 256 * 4
    if _native.available:  # the tracker in pure Python records no stacks
        assert f"{demo}_two.py:9 in distill" in largest["line"]


def test_without_matplotlib(demo, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(f"{demo}:train_step", "--steps", 1, "--out", "out") == 0
    error = capsys.readouterr().err
    assert "no picture was drawn: memsave_ext: a picture needs matplotlib" in error
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"report.txt", "timeline.json"}


def test_progress_on_a_terminal_alone(demo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for on_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda on=on_terminal: on)
        assert run(f"{demo}:train_step", "--steps", 2, "--out", "out") == 0
        written = capsys.readouterr().err
        assert ("\rtrack 1/2: step 1\rtrack 2/2: step 2\r" in written) == on_terminal


def test_the_users_module_sees_none_of_our_arguments(demo, tmp_path, monkeypatch):
    (tmp_path / f"{demo}_argv.py").write_text("import sys\nseen = list(sys.argv)\ndef f(): pass\n")
    monkeypatch.setattr(sys, "argv", ["memsave_ext.memory", "x:y", "--steps", "3"])
    assert run(f"{demo}_argv:f", "--steps", 1) == 0
    assert importlib.import_module(f"{demo}_argv").seen == ["memsave_ext.memory"]


# errors


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{demo}", "MODULE:FUNCTION must look like package.module:name, got '{demo}'"),
        (":f", "must look like package.module:name"),
        ("a:", "must look like package.module:name"),
        ("./{demo}.py:f", "must look like package.module:name"),
        ("not_there:f", "there is no module 'not_there'"),
        ("{demo}.part:f", "there is no module '{demo}.part'"),
        ("{demo}.py:train_step", "did you mean {demo}:train_step?"),
        ("{demo}:nothing", "'{demo}' has no 'nothing'"),
        ("{demo}:trainer.nothing", "'{demo}' has no 'trainer.nothing'"),
        ("{demo}:number", "{demo}:number must be a function, got int"),
        (
            "{demo}:needs",
            "{demo}:needs must take no arguments: missing a required argument: 'batch'",
        ),
    ],
)
def test_functions_that_are_none(demo, capsys, function, message):
    assert run(function.format(demo=demo)) == 2
    error = capsys.readouterr().err
    assert message.format(demo=demo) in error
    assert error.startswith("python -m memsave_ext.memory: ") and error.count("\n") == 1


def test_a_module_that_goes_to_another_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "goes_elsewhere.py").write_text(
        "import os, torch\nos.chdir('elsewhere')\nmodel = torch.nn.Linear(4, 4)\n"
        "def step(): model(torch.ones(2, 4)).sum().backward()\n"
    )
    monkeypatch.setattr(sys, "argv", ["memsave_ext.memory"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert run("goes_elsewhere:step") == 0, capsys.readouterr().err
    assert (tmp_path / "memory-profile" / "report.txt").exists()
    del sys.modules["goes_elsewhere"]


def test_a_function_that_builds_several_optimizers(tmp_path, monkeypatch, capsys):
    (tmp_path / "builds_two.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build(last=None):\n"
        "    g, d = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "    both = [torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())]\n"
        "    def step():\n"
        "        print('stepped')\n"
        "        d(g(torch.ones(2, 4))).sum().backward()\n"
        "        for one in both: one.step()\n"
        "    return nn.ModuleList([g, d]), both if last is None else last, step\n"
        "def wrong(): return build('no optimizer')\n"
    )
    monkeypatch.setattr(sys, "argv", ["memsave_ext.memory"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert run("builds_two:build", "--steps", 2) == 0
    assert capsys.readouterr().out.count("stepped") == 3  # one to warm up
    assert run("builds_two:wrong") == 2
    assert "must return (model, optimizer, step)" in capsys.readouterr().err
    assert run(".builds_two:build") == 2
    del sys.modules["builds_two"]


def test_an_out_that_is_a_file(demo, tmp_path, capsys):
    (tmp_path / "taken").touch()
    assert run(f"{demo}:train_step", "--out", "taken") == 2
    assert "--out: the folder taken cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--steps", "x"], ["--warmup", "-1"], []])
def test_arguments_that_are_none(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main([*(["m:f"] if wrong else []), *wrong])
    assert caught.value.code == 2
    assert "at least" in (error := capsys.readouterr().err) or "invalid int" in error or not wrong


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "--model",
            "{demo}:optimizer",
            "--model: {demo}:optimizer must be a torch.nn.modules.module.Module, got Adam",
        ),
        (
            "--optimizer",
            "{demo}:model",
            "must be a torch.optim.optimizer.Optimizer, got Sequential",
        ),
        ("--model", "{demo}:nothing", "--model: '{demo}' has no 'nothing'"),
        ("--optimizer", "nowhere:o", "--optimizer: there is no module 'nowhere'"),
    ],
)
def test_subjects_that_are_none(demo, capsys, option, value, message):
    assert run(f"{demo}:train_step", option, value.format(demo=demo)) == 2
    assert message.format(demo=demo) in capsys.readouterr().err


def test_what_the_user_raises_passes(demo):
    with pytest.raises(ArithmeticError, match="the user's own") as caught:
        run(f"{demo}:fails")
    assert caught.traceback[-1].name == "fails"
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        run(f"{demo}_fails:f")


# the model and the optimizer that a function uses


def find(function):
    return (
        subjects.find_model(function, "demo:f"),
        subjects.find_optimizer(function, "demo:f"),
    )


GLOBAL = nn.Linear(2, 2)
UNUSED = torch.optim.SGD(GLOBAL.parameters(), lr=1)


def uses_global():
    return GLOBAL


def uses_no_name():
    return None


def test_globals_that_it_uses(demo, monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    module = importlib.import_module(demo)
    assert find(module.train_step) == (module.model, module.optimizer)
    assert find(module.trainer.step) == (module.model, module.optimizer)
    assert subjects.find_model(uses_global, "f") is GLOBAL


def test_all_globals_where_it_uses_none():
    assert find(uses_no_name) == (GLOBAL, UNUSED)


def test_what_a_closure_holds():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)

    def step():
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    assert find(step) == (model, optimizer)

    @functools.wraps(step)
    def decorated():
        step()

    assert find(decorated) == (model, optimizer)
    assert find(functools.partial(lambda m, o: None, model, o=optimizer)) == (model, optimizer)

    class Callable:
        def __init__(self):
            self.model, self.o = model, optimizer

        def __call__(self):
            pass

    assert find(Callable()) == (model, optimizer)


def test_a_wrapped_model_is_found_with_its_wrapper():
    inner = nn.Linear(3, 3)
    outer = nn.Sequential(inner)
    alias, loss = outer, nn.MSELoss()

    def step():
        return inner, outer, alias, loss

    assert subjects.find_model(step, "f") is outer


def test_several_are_an_error():
    student, teacher = nn.Linear(3, 3), nn.Bilinear(2, 2, 2)
    one, two = (torch.optim.SGD(m.parameters(), lr=1) for m in (student, teacher))

    def step():
        return student, teacher, one, two

    names = r"student \(Linear\), teacher \(Bilinear\)"
    with pytest.raises(
        subjects.UsageError, match=f"f uses several models, {names}.*--model MODULE:NAME"
    ):
        subjects.find_model(step, "f")
    with pytest.raises(subjects.UsageError, match=r"one \(SGD\), two \(SGD\).*--optimizer"):
        subjects.find_optimizer(step, "f")


def test_nothing_to_find(capsys, tmp_path):
    unbound = None

    def step():
        return late

    assert subjects.find_optimizer(functools.partial(print, unbound), "f") is None
    assert subjects.find_model(step, "f") is GLOBAL  # a name of its closure is not bound yet
    late = 1
    assert subjects.find_model(len, "f") is None


def test_no_model_is_said(demo, tmp_path, capsys):
    (tmp_path / f"{demo}_bare.py").write_text("import torch\ndef f(): torch.empty(50)\n")
    assert run(f"{demo}_bare:f", "--steps", 2) == 0
    assert "no model was found" in capsys.readouterr().err
    document = json.loads((tmp_path / "memory-profile/timeline.json").read_text())
    assert (document["peak"], document["at_peak"]["other"]) == (200, 200)
