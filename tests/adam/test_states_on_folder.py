"""``states_on=FOLDER``: steps have the bits of an optimizer whose states are in memory."""

import copy
import errno
import gc
import os
import pickle
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import run_threads
from modes import ALL_MODES, both_ways
from processes import run_program
from torch import nn

import memsave_ext as ms
from memsave_ext import _parts
from memsave_ext.adam.files import Files
from memsave_ext.store.mapped import is_mapped

linux = pytest.mark.skipif(sys.platform != "linux", reason="a folder is for Linux")
pytestmark = linux
SHAPES = [(260, 256), (2, 130, 17, 16), (7,), (65536,)]  # of which the third stays in memory


def parameters(dtype=torch.float32, shapes=SHAPES):
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    params[1].data = params[1].data.to(memory_format=torch.channels_last)
    return params


def backward(params, number, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
    (sum((p * g).sum().double() for p, g in zip(params, grads, strict=True)) * scale).backward()


def train(params, optimizer, steps, start=0):
    for number in range(start, start + steps):
        backward(params, number)
        optimizer.step()
        optimizer.zero_grad()


def in_files(optimizer):
    states = [t for state in optimizer.state.values() for t in state.values()]
    return sum(is_mapped(tensor) for tensor in states)


def assert_same(one, other):
    for (params, optimizer), (others, another) in [(one, other)]:
        for param, same in zip(params, others, strict=True):
            assert torch.equal(param, same)
            state, like = optimizer.state[param], another.state[same]
            assert state.keys() == like.keys()
            for name, value in state.items():
                assert torch.equal(value, like[name]), name
                assert value.stride() == like[name].stride(), name


def both(folder, kind=ms.AdamW, dtype=torch.float32, shapes=SHAPES, **options):
    """The same parameters twice: with states in memory, and in the folder."""
    options = {"lr": 1e-2, "in_backward": True, **options}
    made = []
    for place in (None, folder):
        params = parameters(dtype, shapes)
        made.append((params, kind(params, states_on=place, **options)))
    return made


@pytest.mark.parametrize("mode", ALL_MODES)
def test_bits(tmp_path, mode):
    dtype, options = ALL_MODES[mode]
    memory, files = both(tmp_path, dtype=dtype, shapes=SHAPES[:3], **options)
    for one in (memory, files):
        train(*one, steps=2)
    files[1].remove_hooks()
    for one in (memory, files):
        train(*one, steps=1, start=2)
    assert_same(memory, files)
    assert in_files(memory[1]) == 0
    large = [t for state in memory[1].state.values() for t in state.values() if t.nbytes >= 1 << 16]
    assert in_files(files[1]) == len(large)
    assert large or mode in ("SGD", "SGD, fp64", "SGD, fp16", "SGD, bf16", "SGD, stochastic")


def test_under_a_default_device(tmp_path):
    memory, files = both(tmp_path, in_backward=False)
    train(*memory, steps=2)
    params, optimizer = files
    for number in range(2):
        backward(params, number)
        with torch.device("meta"):
            optimizer.step()
        optimizer.zero_grad()
    assert_same(memory, files)


def test_the_folder_stays_empty(tmp_path):
    params, optimizer = both(tmp_path)[1]
    train(params, optimizer, 2)
    assert in_files(optimizer) == 6
    assert list(tmp_path.iterdir()) == []


def test_steps_fetch_and_read_ahead(tmp_path, monkeypatch):
    """In the order of the step before, from the second step on."""
    params, optimizer = both(tmp_path)[1]
    place, events = optimizer.param_groups[0]["states_on"], []
    read_ahead = os.posix_fadvise
    fetch = Files.fetch

    def fetched(self, state, device):
        events.append(
            (
                "fetch",
                place._region_of(state["exp_avg"]).offset
                if "exp_avg" in state and place.has(state["exp_avg"])
                else None,
            )
        )
        return fetch(self, state, device)

    def advised(descriptor, offset, size, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        events.append(("ahead", offset))
        return read_ahead(descriptor, offset, size, advice)

    monkeypatch.setattr(Files, "fetch", fetched)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    train(params, optimizer, 1)
    first = [offset for what, offset in events if what == "fetch" and offset is not None]
    assert len(first) == 3
    events.clear()
    train(params, optimizer, 2, start=1)
    fetches = [offset for what, offset in events if what == "fetch" and offset is not None]
    assert fetches == first * 2
    ahead = [offset for what, offset in events if what == "ahead"]
    # Those of both moments. The last one of a step is followed by the first of the next.
    assert [offset for offset in ahead if offset in first] == (first[1:] + first[:1]) * 2


# ---- memory ----

_TRAIN = """
import ctypes, os, resource, torch
import memsave_ext as ms
torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes to the system
params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(8)]
def resident():
    lines = (line.split() for line in open("/proc/self/status"))
    sizes = {words[0]: int(words[1]) for words in lines if words[-1] == "kB"}
    return sizes["RssAnon:"] + sizes["RssFile:"] + sizes["RssShmem:"], sizes["VmData:"]
before, data = resident()
limit = int(os.environ["LIMIT"])
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, ((data << 10) + limit, resource.RLIM_INFINITY))
optimizer = ms.AdamW(params, in_backward=True, states_on=os.environ["WHERE"] or None)
for _ in range(3):
    sum((p * 2).sum() for p in params).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]  # which reads nothing
print(resident()[0] - before, flush=True)
"""
STATES = 8 * 8 << 20  # bytes


def mapped(folder):
    """Bytes of files in a folder that the process has mapped and in memory."""
    is_ours, count = False, 0
    with open("/proc/self/smaps") as lines:
        for words in map(str.split, lines):
            if "-" in words[0]:
                is_ours = len(words) > 5 and words[5].startswith(str(folder))
            elif is_ours and words[0] == "Rss:":
                count += int(words[1]) << 10
    return count


def test_what_was_read_leaves_memory_with_the_next_step(tmp_path):
    params = parameters()
    optimizer = ms.AdamW(params, in_backward=True, states_on=tmp_path)
    train(params, optimizer, 1)
    assert mapped(tmp_path) == 0
    sum(t.sum() for state in optimizer.state.values() for t in state.values())
    assert mapped(tmp_path) >= 2 * params[0].nbytes
    train(params, optimizer, 1)
    assert mapped(tmp_path) == 0


@pytest.mark.once
def test_resident_bytes(tmp_path):
    """Of the process, as the system counts them."""
    grown = []
    for where in ("", str(tmp_path)):
        done = run_program(_TRAIN, WHERE=where, LIMIT="0")
        assert done.returncode == 0, done.stderr
        grown.append(int(done.stdout) << 10)
    assert grown[0] > STATES
    assert grown[0] - grown[1] > 0.8 * STATES  # but for a parameter's, in a buffer


def test_within_a_limit_of_the_system(tmp_path):
    # All gradients' worth, and a parameter's states.
    limit = str(STATES * 3 // 4)
    assert "can't allocate memory" in run_program(_TRAIN, WHERE="", LIMIT=limit).stderr
    done = run_program(_TRAIN, WHERE=str(tmp_path), LIMIT=limit)
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    code = _TRAIN + "os.kill(os.getpid(), 9)"
    done = run_program(code, WHERE=str(tmp_path), LIMIT="0")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- what an optimizer has beside steps ----


@pytest.mark.parametrize("saved_in", [0, 1], ids=["memory", "folder"])
@pytest.mark.parametrize("loaded_in", [0, 1], ids=["memory", "folder"])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}], ids=["fp32", "8bit"])
def test_checkpoints(tmp_path, saved_in, loaded_in, options):
    """States move to where they belong."""
    params, optimizer = both(tmp_path, **options)[saved_in]
    train(params, optimizer, 2)
    assert "states_on" not in optimizer.state_dict()["param_groups"][0]
    torch.save(optimizer.state_dict(), tmp_path / "states.pt")
    others, another = both(tmp_path, **options)[loaded_in]
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param)
    another.load_state_dict(torch.load(tmp_path / "states.pt"))
    assert_same((params, optimizer), (others, another))
    assert in_files(another) == (6 if loaded_in else 0)
    train(params, optimizer, 2, start=2)
    train(others, another, 2, start=2)
    assert_same((params, optimizer), (others, another))


def test_a_state_dict_in_use_is_copied_where_it_moves(tmp_path):
    memory, files = both(tmp_path)
    train(*memory, 2)
    train(*files, 2)
    kept = copy.deepcopy(files[1].state_dict()["state"])
    memory[1].load_state_dict(files[1].state_dict())
    assert in_files(memory[1]) == 0
    train(*memory, 1, start=2)
    for index, state in files[1].state_dict()["state"].items():
        if is_mapped(state["exp_avg_sq"]):
            assert torch.equal(state["exp_avg_sq"], kept.pop(index)["exp_avg_sq"])
    assert len(kept) == 1
    memory, files = both(tmp_path)
    train(*memory, 2)
    train(*files, 2)
    files[1].load_state_dict(files[1].state_dict())
    for one in (memory, files):
        train(*one, 1, start=2)
    assert_same(memory, files)


def test_room_that_states_leave_is_used_again(tmp_path):
    memory, files = both(tmp_path)
    for one in (memory, files):
        train(*one, 1)
    sizes = []
    for _ in range(4):
        files[1].load_state_dict(copy.deepcopy(memory[1].state_dict()))
        descriptor = files[1].param_groups[0]["states_on"].file.descriptor()
        sizes.append(os.fstat(descriptor).st_size)
    assert_same(memory, files)
    assert sizes == sizes[:1] * 4
    files[1].state.clear()  # new states, of zeros, in what others have left
    memory[1].state.clear()
    for one in (memory, files):
        train(*one, 2, start=1)
    assert_same(memory, files)
    assert os.fstat(descriptor).st_size == sizes[0]


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_reads_and_writes_in_parts(tmp_path, monkeypatch, name):
    """As the system makes them of more than 2 GiB."""
    call, calls = getattr(os, name), []

    def some(descriptor, parts, offset):
        calls.append(offset)
        return call(descriptor, [parts[0][:100_000]], offset)

    monkeypatch.setattr(os, name, some)
    made = both(tmp_path)
    for one in made:
        train(*one, 2)
    assert len(calls) > 6
    assert_same(*made)


def test_a_torch_checkpoint_and_back(tmp_path):
    params, optimizer = both(tmp_path)[1]
    torchs = torch.optim.AdamW(parameters(), lr=1e-2)
    train(torchs.param_groups[0]["params"], torchs, 1)
    optimizer.load_state_dict(torchs.state_dict())
    assert in_files(optimizer) == 6
    torchs.load_state_dict(optimizer.to_fp32_state_dict())
    train(torchs.param_groups[0]["params"], torchs, 1)
    train(params, optimizer, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_have_states_of_their_own(tmp_path, copied):
    memory, (params, optimizer) = both(tmp_path)
    train(*memory, 2)
    train(params, optimizer, 2)
    another = copied(optimizer)
    others = another.param_groups[0]["params"]
    assert in_files(another) == 6
    train(others, another, 2, start=5)
    assert_same(memory, (params, optimizer))
    train(params, optimizer, 2, start=5)
    assert_same((others, another), (params, optimizer))


def test_groups_and_schedulers(tmp_path):
    """A group can leave its states in memory, or in another folder."""
    made = both(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for (params, optimizer), places in zip(made, [(None, None), (None, other)], strict=True):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for place in places:
            params.append(nn.Parameter(torch.ones(70000)))
            optimizer.add_param_group({"params": [params[-1]], "states_on": place, "lr": 0.1})
        for number in range(3):
            train(params, optimizer, 1, start=number)
            schedule.step()
    assert_same(*made)
    assert in_files(made[1][1]) == 8
    assert list(other.iterdir()) == []


def norm_passes(params, optimizer, number):
    with optimizer.norm_pass(max_norm=0.5):
        backward(params, number)
    backward(params, number)
    optimizer.step()


def accumulates(params, optimizer, number):
    with optimizer.accumulate():
        backward(params, number)
    backward(params, number + 10)
    optimizer.step()


def overwrites(params, optimizer, number):
    """The low part of an overwritten parameter goes."""
    with torch.no_grad():
        params[0].mul_(0.9)
    backward(params, number)
    optimizer.step()


def loses_hooks(params, optimizer, number):
    backward(params, number)
    optimizer.step()
    if number == 1:
        optimizer.remove_hooks()


LOOPS = {
    "norm_pass": (norm_passes, {}),
    "accumulate": (accumulates, {}),
    "clip_global_norm": (accumulates, {"clip_global_norm": 0.5, "in_backward": False}),
    "max_grad_norm": (accumulates, {"max_grad_norm": 0.5}),
    "split": (overwrites, {"bf16": "split", "dtype": torch.bfloat16}),
    "remove_hooks": (loses_hooks, {}),
    "small buckets": (accumulates, {"small_bytes": 1 << 30, "bucket_bytes": 1 << 30}),
}


@pytest.mark.filterwarnings("ignore:memsave_ext. norm_pass")
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(tmp_path, loop):
    steps, options = LOOPS[loop]
    made = both(tmp_path, **options)
    for params, optimizer in made:
        for number in range(3):
            optimizer.zero_grad()
            steps(params, optimizer, number)
    assert_same(*made)
    assert in_files(made[1][1]) >= 6


def test_loss_scaling(tmp_path):
    """The third gradient is not finite, and of some parameters alone."""
    made = both(tmp_path)
    for params, optimizer in made:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        optimizer.grad_scaler = scaler
        for number in range(5):
            if number == 2:
                (params[0] * torch.inf).sum().backward()
            else:
                backward(params, number, scaler.scale(torch.ones(())).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(*made)


def test_rows_of_a_loss_head_are_not_stepped_apart(tmp_path):
    results = []
    for place in (None, tmp_path):
        torch.manual_seed(0)
        x, weight = torch.randn(64, 64), nn.Parameter(torch.randn(1024, 64))
        optimizer = ms.AdamW([weight], in_backward=True, states_on=place)
        for _ in range(2):
            ms.linear_cross_entropy(x, weight, torch.arange(64)).backward()
            optimizer.step()
        results.append(weight)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_several_backwards_at_once(tmp_path):
    made = both(tmp_path)
    for params, optimizer in made:
        for number in range(3):
            run_threads(lambda i, params=params, number=number: backward([params[i]], number), 4)
            optimizer.step()
    assert_same(*made)


# ---- errors ----


def test_an_error_in_the_middle_of_a_backward(tmp_path):
    made = both(tmp_path)
    for params, optimizer in made:
        train(params, optimizer, 1)
        handle = params[1].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(params, 1)
        handle.remove()
        optimizer.zero_grad()
        train(params, optimizer, 1, start=2)
    assert_same(*made)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_seen_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"states_on='.*': no room for [\d,]+ bytes of .*: No space"):
        ms.AdamW(parameters(), states_on=tmp_path)
    params, optimizer = both(None)[1]
    with pytest.raises(OSError, match="no room for"):
        optimizer.add_param_group(
            {"params": nn.Parameter(torch.ones(70000)), "states_on": tmp_path}
        )
    assert len(optimizer.param_groups) == 1
    train(params, optimizer, 1)


def test_a_disk_that_is_really_too_small(tmp_path):
    code = (
        """
import os, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
"""
        + _TRAIN
    )
    done = run_program(code, WHERE=str(tmp_path), LIMIT="0")
    assert "no room for 67,108,864 bytes of optimizer states" in done.stderr
    assert done.returncode == 1


def test_a_full_disk_leaves_an_optimizer_as_it_was(tmp_path, monkeypatch):
    memory, files = both(tmp_path)
    for one in (memory, files):
        train(*one, 1)
    saved = copy.deepcopy(files[1].state_dict())
    files[1].param_groups[0]["lr"] = memory[1].param_groups[0]["lr"] = 0.5
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room for"):
        files[1].load_state_dict(saved)
    monkeypatch.undo()
    for one in (memory, files):
        train(*one, 1, start=1)
    assert_same(memory, files)


@both_ways
def test_states_that_cannot_be_written_back(tmp_path, monkeypatch, in_backward):
    """The parameter has been stepped then, which nothing passes over."""
    params, optimizer = both(tmp_path, in_backward=in_backward)[1]
    train(params, optimizer, 1)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        train(params, optimizer, 1, start=1)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="raised"):
        optimizer.step()
    optimizer.zero_grad()
    train(params, optimizer, 1, start=1)


@both_ways
def test_a_first_step_that_fails_keeps_the_states_of_what_was_stepped(
    tmp_path, monkeypatch, in_backward
):
    params, optimizer = both(tmp_path, in_backward=in_backward)[1]
    start, write, written = [p.detach().clone() for p in params], os.pwritev, []

    def fails(*args):
        if len(written) >= 4:
            full()
        written.append(args)
        return write(*args)

    monkeypatch.setattr(os, "pwritev", fails)
    with pytest.raises(OSError, match="No space left"):
        train(params, optimizer, 1)
    monkeypatch.undo()
    stepped = [p for p, before in zip(params, start, strict=True) if not torch.equal(p, before)]
    assert stepped and all(optimizer.state[p]["step"] == 1 for p in stepped)


@pytest.mark.parametrize("state_dtype", ["8bit", "4bit"])
def test_parameters_that_are_not_dense_have_float32_states(tmp_path, state_dtype):
    runs = []
    for where in (None, tmp_path):
        torch.manual_seed(1)
        param = nn.Parameter(torch.randn(256, 512)[:, :256])
        optimizer = ms.AdamW([param], state_dtype=state_dtype, states_on=where)
        train([param], optimizer, 3)
        runs.append(([param], optimizer))
    assert_same(*runs)
    assert runs[1][1].state[param]["exp_avg"].dtype == torch.float32 and in_files(runs[1][1]) == 2


def test_after_a_fork(tmp_path):
    code = """
import os, torch, memsave_ext as ms
torch.set_num_threads(1)  # a fork has none of the others
params = [torch.nn.Parameter(torch.ones(70000))]
optimizer = ms.AdamW(params, in_backward=True, states_on=os.environ["WHERE"])
params[0].sum().backward()
optimizer.step()
child = os.fork()
if child == 0:
    try:
        params[0].sum().backward()
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
params[0].sum().backward()
optimizer.step()
"""
    done = run_program(code, WHERE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "was made before this process was forked" in done.stdout


def test_a_file_that_the_program_closes_is_not_taken_for_another(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    params = parameters()
    optimizer = ms.AdamW(params, states_on=tmp_path)
    backward(params, 0)
    optimizer.step()
    number = optimizer.param_groups[0]["states_on"].file.descriptor()
    os.close(number)
    taken = os.open(other, os.O_RDWR)
    assert taken == number
    backward(params, 1)
    with pytest.raises(RuntimeError, match="has been closed by the program"):
        optimizer.step()
    del optimizer, params
    gc.collect()
    assert os.pread(taken, 10, 0) == b"mine"
    os.close(taken)


def test_no_such_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for wrong in (tmp_path / "none", file, ""):
        with pytest.raises(
            ValueError, match=rf"states_on must be None, 'cpu' or a folder.*got '{wrong}'"
        ):
            ms.AdamW(parameters(), states_on=wrong)
    for wrong in (3, b"x", True):
        with pytest.raises(TypeError, match="states_on must be None, 'cpu' or a folder, got"):
            ms.AdamW(parameters(), states_on=wrong)
    optimizer = ms.AdamW(parameters())
    with pytest.raises(ValueError, match="states_on must be"):
        optimizer.add_param_group({"params": parameters(), "states_on": str(file)})
    with pytest.raises(ValueError, match="differentiable=True.*has no states_on"):
        ms.AdamW(parameters(), states_on=tmp_path, differentiable=True)


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkstemp", denied)
    with pytest.raises(PermissionError, match=r"states_on='.*': cannot make a file: Permission"):
        ms.AdamW(parameters(), states_on=tmp_path)


@both_ways
def test_an_option_that_is_changed_later(tmp_path, in_backward):
    params, optimizer = both(tmp_path, in_backward=in_backward)[0]
    optimizer.param_groups[0]["states_on"] = str(tmp_path)
    with pytest.raises(TypeError, match="states_on of a param group cannot be changed"):
        train(params, optimizer, 1)


def test_cpu_is_where_they_are(tmp_path):
    made = both("cpu")
    for one in made:
        train(*one, 2)
    assert_same(*made)
    assert in_files(made[1][1]) == 0
    elsewhere = SimpleNamespace(device=torch.device("mps"))
    with pytest.raises(
        ValueError, match="'cpu' is only for parameters on CUDA devices and on the CPU, got"
    ):
        made[1][1].param_groups[0]["states_on"].check([elsewhere])
    with pytest.raises(ValueError, match="on the CPU and on CUDA devices, got a parameter on mps"):
        Files(tmp_path).check([elsewhere])


# ---- what is said of memory ----


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))


def test_tracked_and_predicted(tmp_path):
    """A parameter's states are in memory, in a buffer, and all others are not."""
    x, peaks = torch.randn(8, 256), []
    for place in (None, tmp_path):
        model = wide()
        optimizer = ms.AdamW(model.parameters(), in_backward=True, states_on=place)

        def step(model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()

        predicted = ms.memory.predict(model, optimizer, x, loss=lambda y: y.square().mean())
        step()
        with ms.memory.track(model, optimizer) as tracker:
            step()
        if _parts.native("adam"):  # in pure Python a step has temporaries of its own
            assert predicted.peak == pytest.approx(tracker.peak, rel=0.01)
        held = ms.memory.footprint(model, optimizer)
        weights = 2 * 4 * 2 * 256 * 512 if place is None else 0
        assert held.now.optimizer.bytes == weights + 2 * 4 * (512 + 256) + 4 * 4
        peaks.append(tracker.peak)
    if _parts.native("adam"):
        assert peaks[0] - peaks[1] == pytest.approx(2 * 4 * 256 * 512, rel=0.05)
    assert list(tmp_path.iterdir()) == []


def test_room_for_a_group_that_is_added_before_a_step(tmp_path):
    first, second = (nn.Parameter(torch.ones(256, 256)) for _ in range(2))
    optimizer = ms.AdamW([first], states_on=tmp_path)
    file = optimizer.param_groups[0]["states_on"].file
    assert file._size == 2 * first.nbytes
    optimizer.add_param_group({"params": [second]})
    assert file._size == 4 * first.nbytes
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert file._size == 4 * first.nbytes


def test_a_small_state_that_comes_first_takes_no_room_of_large_ones(tmp_path):
    large, small = nn.Parameter(torch.ones(1024, 1024)), nn.Parameter(torch.ones(256, 256))
    optimizer = ms.AdamW([large], in_backward=True, states_on=tmp_path)
    optimizer.add_param_group({"params": [small]})
    file = optimizer.param_groups[0]["states_on"].file
    size = file._size
    small.sum().backward()
    large.sum().backward()
    optimizer.step()
    assert file._size == size == 2 * (large.nbytes + small.nbytes)


def test_states_that_are_slices(tmp_path):
    """As where inputs of a layer are pruned, with their states."""
    found = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        param, by = nn.Parameter(torch.randn(512, 512)), torch.randn(512, 512)
        optimizer = ms.AdamW([param], lr=0.1, states_on=folder)
        (param * by).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        pruned = nn.Parameter(param.detach()[:, :256].clone())
        state = optimizer.state.pop(param)
        optimizer.state[pruned] = {n: v if n == "step" else v[:, :256] for n, v in state.items()}
        optimizer.param_groups[0]["params"] = [pruned]
        for _ in range(2):
            (pruned * by[:, :256]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(pruned.detach())
    assert torch.equal(*found)
