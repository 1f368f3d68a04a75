"""``memory.track`` of blocks: recomputes are a phase of their own."""

from processes import run_program
from remat_programs import everything, layers

import memsave_ext as ms
from memsave_ext.memory import PHASES


def test_rematerializing_is_a_phase():
    model, x = layers()
    with ms.memory.track(model) as track:
        with everything():
            loss = model(x).square().mean()
        loss.backward()
    phases = {PHASES[phase] for phase in track.timeline.phase.tolist()}
    assert {"forward", "backward", "rematerialize"} <= phases
    assert "recompute" not in phases
    assert track.regions
    assert {region.phase for region in track.regions} == {"rematerialize"}
    assert {region.name for region in track.regions} <= {name for name, _ in model.named_modules()}
    assert any(region.name and region.saved_bytes for region in track.regions)


def test_regions_and_blocks_are_told_apart():
    model, x = layers()
    first, second = model[:4], model[4:]
    with ms.memory.track(model) as track:
        with everything():
            loss = second(ms.checkpoint(first, x).sin()).square().mean()
        loss.backward()
    calls = {"recompute": 0, "rematerialize": 0}
    for region in track.regions:
        calls[region.phase] += region.calls
    assert calls["recompute"] == 1 and calls["rematerialize"] > 1
    report = track.report()
    assert "Checkpointed regions" in report and "Rematerialized" in report
    document = track.to_json()
    assert [ms.memory.Region(**region) for region in document["regions"]] == track.regions


_FIRST_BLOCK = """
import torch
import memsave_ext as ms
x = torch.ones(1000, requires_grad=True)
with ms.memory.track() as t, ms.remat():
    x.exp().sum().backward()
print(t.peak)
"""


def test_what_a_block_measures_with_does_not_count():
    """How fast memory is copied, by the first block of a process."""
    done = run_program(_FIRST_BLOCK)
    assert done.returncode == 0, done.stderr
    assert 4000 <= int(done.stdout) < 1 << 20
