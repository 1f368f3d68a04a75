"""DTensors that no FSDP2 made, on gloo ranks: split along several dimensions of a mesh, or not
where their gradients and states are."""

import functools
import io
import os
import threading

import pytest
import sampling
import torch
import torch.distributed.checkpoint as dcp
from fsdp_blocks import OPTIMIZERS, local, make
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import memsave_ext as ms

FOLDER = "MEMSAVE_EXT_TEST_FOLDER"  # an environment variable, which the ranks inherit
BOTH_ON_0, ROWS_AND_COLUMNS = (Shard(0), Shard(0)), (Shard(0), Shard(1))
PLACEMENTS = [
    BOTH_ON_0, ROWS_AND_COLUMNS, (Shard(1), Shard(0)), (Replicate(), Shard(0)),
    (Shard(0), Replicate()), (Replicate(), Replicate()),
]  # fmt: skip
# Uneven: shards of 3, 2, 2 and 2 rows; of 1 and none; of 1, 1, 1 and 0. Then even ones.
SHAPES = [(9, 4096), (2, 5000), (3, 8192), (16, 2048), (4, 6)]
PLAIN = {
    "SGD": lambda params: ms.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Lion": lambda params: ms.Lion(params, lr=0.01, weight_decay=0.1),
    "Adam": lambda params: ms.Adam(params, lr=0.01),
}
MAKES = PLAIN | {
    name: lambda params, name=name: make(name, params, in_backward=False) for name in OPTIMIZERS
}


def values(shape, number, mesh, placements):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return distribute_tensor(whole, mesh, placements)


def cases_of(full):
    """(Optimizer, shape, placements) of each; without ``full`` a third of them, in which each
    optimizer has all shapes and placements, and these have each other."""
    return [
        (name, shape, placements)
        for i, name in enumerate(MAKES)
        for j, placements in enumerate(PLACEMENTS)
        for k, shape in enumerate(SHAPES)
        if full or (i + j + k) % 3 == 0
    ]


def split_twice(cases):
    """What each comes to beside a plain parameter of this process's part; and what of the states
    was not saved and loaded."""
    mesh, results, not_restored = init_device_mesh("cpu", (2, 2)), [], {}
    for name, make_optimizer in MAKES.items():
        states = {}
        for shape, placements in (rest for of, *rest in cases if of == name):
            state, *found = beside_plain(make_optimizer, shape, mesh, placements)
            states |= {f"{shape} {placements} {key}": v for key, v in state.items()}
            results.append((name, shape, placements, *found))
        not_restored[name] = unlike_after_loading(states, f"{os.environ[FOLDER]}/{name}")
    return results, not_restored


def beside_plain(make_optimizer, shape, mesh, placements):
    param = nn.Parameter(values(shape, 0, mesh, placements))
    plain = nn.Parameter(local(param.detach()).clone())
    optimizer, other = make_optimizer([param]), make_optimizer([plain])
    for number in range(1, 4):
        param.grad = values(shape, number, mesh, placements)
        plain.grad = local(param.grad).clone()
        optimizer.step()
        other.step()
    state = optimizer.state[param]
    not_placed = [key for key in state if isinstance(state[key], DTensor) == (key == "step")]
    distance = (local(param.detach()) - plain.detach()).abs()
    alike = state.keys() == other.state[plain].keys()  # a small shard by itself has no blocks
    return state, alike, float(distance.max()) if distance.numel() else 0.0, not_placed


def unlike_after_loading(states, folder):
    dcp.save(states, checkpoint_id=folder)
    loaded = {key: torch.zeros_like(value) for key, value in states.items()}
    dcp.load(loaded, checkpoint_id=folder)
    return [key for key in states if not torch.equal(local(loaded[key]), local(states[key]))]


def misplaced():
    """The errors of gradients and states that are of other meshes, or of none."""
    mesh, turned = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
    found = {}
    for name, make_optimizer in MAKES.items():

        def stepped(mesh, placement, make_optimizer=make_optimizer):
            param = nn.Parameter(values((4, 8), 0, mesh, [placement]))
            optimizer = make_optimizer([param])
            param.grad = values((4, 8), 1, mesh, [placement])
            optimizer.step()
            return param, optimizer

        def gradient(grad, stepped=stepped):
            param, optimizer = stepped(mesh, Shard(0))
            before = local(param.detach()).clone()
            param.grad = grad
            said = error_of(optimizer.step)
            return said, torch.equal(before, local(param.detach()))

        def load(mesh_, placement, stepped=stepped):
            file = io.BytesIO()
            torch.save(stepped(mesh_, placement)[1].state_dict(), file)
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            return error_of(lambda: stepped(mesh, Shard(0))[1].load_state_dict(saved))

        found[name] = {
            "gradient turned": gradient(values((4, 8), 2, turned, [Shard(0)])),
            "gradient plain": gradient(torch.ones(4, 8)),
            "gradient replicated": gradient(values((4, 8), 2, mesh, [Replicate()])),
            "state turned": load(turned, Shard(0)),
            "state of columns": load(mesh, Shard(1)),
            "state": load(DeviceMesh("cpu", [0, 1]), Shard(0)),
            "state of a named mesh": load(
                init_device_mesh("cpu", (2,), mesh_dim_names=("shards",)), Shard(0)
            ),
            "state of a thread": of_another_thread(load),
        }
    return found


def of_another_thread(load):
    """Torch takes meshes of two threads, and so one that was saved, to be different."""
    said = []
    thread = threading.Thread(target=lambda: said.append(load(DeviceMesh("cpu", [0, 1]), Shard(0))))
    thread.start()
    thread.join()
    return said[0]


def error_of(function):
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def used_once():
    """How many collectives backwards make of a gradient that is a partial sum in each process, and
    how far the parameter is from one of a plain optimizer at last."""
    mesh, batch = init_device_mesh("cpu", (2,)), torch.randn(8, 6, dtype=torch.float64)
    start = torch.randn(6, 5, dtype=torch.float64)
    param = nn.Parameter(distribute_tensor(start, mesh, [Replicate()]))
    plain = nn.Parameter(start.clone())
    optimizer = ms.AdamW([param], lr=0.1, in_backward=True)
    other = torch.optim.AdamW([plain], lr=0.1)
    accumulates = []

    def backward(factor):
        x = distribute_tensor(batch * factor, mesh, [Shard(0)])
        loss = (x @ param).square().sum().full_tensor()
        with CommDebugMode() as mode:
            loss.backward()
        return mode.get_total_counts()

    found = {}
    with optimizer.paused():
        found["paused"] = backward(1)
    with optimizer.accumulate():
        found["accumulate"] = backward(2)
    optimizer.accumulate_when(lambda: bool(accumulates))
    accumulates.append(True)
    found["accumulate_when"] = backward(3)
    accumulates.clear()
    with optimizer.paused(keep=True):
        found["paused, kept"] = backward(4)
    found["stepped"] = backward(5)
    optimizer.step()
    sum((batch * factor @ plain).square().sum() for factor in range(2, 6)).backward()
    other.step()
    return found, float((local(param.detach()) - plain.detach()).abs().max())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("checkpoint"))
    split = functools.partial(split_twice, cases_of(sampling.full))
    found = run_ranks(4, {"split_twice": split}) | run_ranks(2, [misplaced, used_once])
    del os.environ[FOLDER]
    return found


def test_steps_are_those_of_the_shards(results):
    for rank in results["split_twice"]:
        assert isinstance(rank, tuple), rank
        found, not_restored = rank
        assert len(found) == len(cases_of(sampling.full))
        for name, shape, placements, alike, distance, not_placed in found:
            assert distance == 0 if alike else distance < 0.05, (name, shape, placements)
            assert not_placed == [], (name, shape, placements)
        assert not any(not_restored.values()), not_restored


def test_a_gradient_that_is_not_used_takes_no_collective(results):
    for rank in results["used_once"]:
        assert isinstance(rank, tuple), rank
        found, distance = rank
        assert found.pop("stepped") == 1 and not any(found.values()), found
        assert distance < 1e-12


def test_a_gradient_of_another_mesh_is_refused(results):
    for rank in results["misplaced"]:
        assert isinstance(rank, dict), rank
        for found in rank.values():
            for kind, got in (("turned", "one on DeviceMesh"), ("plain", "a plain tensor")):
                said, unchanged = found[f"gradient {kind}"]
                assert said.startswith("RuntimeError: memsave_ext: the gradient of a DTensor must")
                assert f"got {got}" in said and unchanged
            assert found["gradient replicated"] == ("", False)


def test_states_of_another_mesh_are_refused(results):
    for rank in results["misplaced"]:
        assert isinstance(rank, dict), rank
        for found in rank.values():
            for kind in ("turned", "of columns"):
                assert "Load it with torch.distributed.checkpoint" in found[f"state {kind}"]
            for kind in ("", " of a named mesh", " of a thread"):
                assert found[f"state{kind}"] == ""
