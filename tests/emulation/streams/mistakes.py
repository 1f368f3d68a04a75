"""Mistakes in the order of streams and locks, each of which the named cases see in every run.

All are put into one copy of the sources, where MISTAKE says whether it is this one that runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

# The last one: it has a list of mistakes of its own.
sys.path.append(str(Path(__file__).resolve().parents[2] / "mistakes"))
from switch import VARIABLE, with_mistakes  # noqa: F401

IN_CPP = "::emulated::is_mistaken({number})"


@dataclass
class Mistake:
    what: str
    file: str  # in csrc, or in the package
    right: str
    wrong: str
    cases: str  # words of pytest's -k, each of which must see it
    seen: str  # in the failure; "a|b": one of both
    native: bool = True  # False: in pure Python


UNORDERED = "nothing orders the two"
FREED = "may still use"
DIFFERS = "assert False"
MISTAKES = [
    Mistake(
        "who gives way waits for the step, whose thread may wait for the allocator",
        "remat/step.cpp",
        "  const std::unique_lock<Lock> lock(mutex_, std::try_to_lock);\n",
        "  std::unique_lock<Lock> lock(mutex_, std::defer_lock);\n"
        "  MISTAKE ? lock.lock() : void(lock.try_lock());\n",
        "device_that_is_full",
        "of csrc/locks.h is awaited while",
    ),
    Mistake(
        "a captured recompute draws from the graph's beginning",
        "checkpoint/cuda.cpp",
        "now.offset_intragraph_}",
        "MISTAKE ? 0 : now.offset_intragraph_}",
        "replays",
        DIFFERS,
    ),
    Mistake(
        "partial sums of norms, and found_inf, are those of all streams",
        "memsave_ext/adam/norms.py",
        "return device, current_stream(device)",
        "return device, None if MISTAKE else current_stream(device)",
        "norm infinite",
        UNORDERED,
    ),
    Mistake(
        "partial sums of norms are put together without a wait",
        "memsave_ext/adam/norms.py",
        "            use_here(tensor, stream)\n",
        "            MISTAKE or use_here(tensor, stream)\n",
        "norm_that_is_read",
        UNORDERED,
    ),
    Mistake(
        "a gradient is freed that another stream still reads",
        "adam/backward.cpp",
        "      for (Parameter* parameter : ready) parameter->grad.record_stream(*current);\n",
        "      for (Parameter* p : ready) if (!MISTAKE) p->grad.record_stream(*current);\n",
        "gradients_of_several_streams",
        FREED,
    ),
    Mistake(
        "a DTensor is handed to record_stream",
        "adam/backward.cpp",
        "grads.push_back(parameter->grad)",
        "grads.push_back(MISTAKE ? parameter->tensor.mutable_grad() : parameter->grad)",
        "fsdp",
        "record_stream",
    ),
    Mistake(
        "a gradient of FSDP2 is freed that the step beside still reads",
        "adam/backward.cpp",
        "for (const Tensor& grad : grads) grad",
        "for (const Tensor& grad : grads) if (!MISTAKE) grad",
        "fsdp",
        FREED,
    ),
    Mistake(
        "a step beside FSDP2's reductions does not wait for its gradient",
        "adam/backward.cpp",
        "  order_after(beside, current);\n",
        "  if (!(MISTAKE && current == *made_on)) order_after(beside, current);\n",
        "fsdp",
        UNORDERED,
    ),
    Mistake(
        "a step beside FSDP2's reductions does not wait for states made at the end of backward",
        "adam/backward.cpp",
        "order_after(beside, current);\n  if",
        "if (!(MISTAKE && current != *made_on)) order_after(beside, current);\n  if",
        "watched",
        UNORDERED,
    ),
    Mistake(
        "gloo's future steps on its thread's stream",
        "memsave_ext/adam/ddp.py",
        "            with _that_backward_waits_for(stream):\n",
        "            with _that_backward_waits_for(None if MISTAKE else stream):\n",
        "ddp",
        UNORDERED,
    ),
    Mistake(
        "gloo's future steps after autograd has waited for its stream",
        "memsave_ext/adam/ddp.py",
        "        if stream is not None:\n",
        "        if stream is not None and not MISTAKE:\n",
        "ddp",
        UNORDERED,
    ),
    Mistake(
        "backward waits for each of NCCL's reductions",
        "memsave_ext/adam/ddp.py",
        "        return reduction.then(finish)\n",
        "        if MISTAKE:\n"
        "            both = torch.futures.collect_all([reduction])\n"
        "            return both.then(lambda d: finish(d.value()[0]))\n"
        "        return reduction.then(finish)\n",
        "nccl",
        "assert not True",
    ),
    Mistake(
        "a step does not wait for gloo, which was done before the hook",
        "memsave_ext/adam/ddp.py",
        "not in (stream, default):",
        "not in (default if MISTAKE else stream, default):",
        "ddp",
        UNORDERED,
    ),
    Mistake(
        "states are stepped before they have arrived from the host",
        "memsave_ext/adam/host_memory.py",
        "        torch.cuda.current_stream(device).wait_event(copies.arrived)\n",
        "        MISTAKE or torch.cuda.current_stream(device).wait_event(copies.arrived)\n",
        "states_on_the_host",
        UNORDERED,
    ),
    Mistake(
        "states are copied to the host before their step",
        "memsave_ext/adam/host_memory.py",
        "        out.wait_stream(torch.cuda.current_stream(self._device))\n",
        "        MISTAKE or out.wait_stream(torch.cuda.current_stream(self._device))\n",
        "states_on_the_host",
        UNORDERED,
    ),
    Mistake(
        "states are copied in where others are still copied out, or before they are there",
        "memsave_ext/adam/host_memory.py",
        "    into.wait_stream(out)\n",
        "    MISTAKE or into.wait_stream(out)\n",
        "states_on_the_host",
        f"{UNORDERED}|{FREED}",
    ),
    Mistake(
        "states are copied in where others may still be stepped",
        "memsave_ext/adam/host_memory.py",
        "    into.wait_stream(torch.cuda.current_stream(device))\n",
        "    MISTAKE or into.wait_stream(torch.cuda.current_stream(device))\n",
        "fetched_and_dropped",
        f"{UNORDERED}|{FREED}",
    ),
    Mistake(
        "gradients are copied to the host before they are made",
        "memsave_ext/store/kept.py",
        "        out.wait_stream(torch.cuda.current_stream(values.device))\n",
        "        MISTAKE or out.wait_stream(torch.cuda.current_stream(values.device))\n",
        "gradients_on_the_host",
        UNORDERED,
    ),
    Mistake(
        "gradients come back before they have left",
        "memsave_ext/store/kept.py",
        "        torch.cuda.current_stream(into.device).wait_event(self._written)\n",
        "        MISTAKE or torch.cuda.current_stream(into.device).wait_event(self._written)\n",
        "gradients_on_the_host",
        UNORDERED,
    ),
    Mistake(
        "gradients are freed before they have left",
        "memsave_ext/store/kept.py",
        "        values.record_stream(out)\n",
        "        MISTAKE or values.record_stream(out)\n",
        "gradients_on_the_host",
        FREED,
    ),
    Mistake(
        "what goes to a file is copied out before it is made",
        "memsave_ext/store/host.py",
        "            out.wait_stream(torch.cuda.current_stream(values.device))\n",
        "            MISTAKE or out.wait_stream(torch.cuda.current_stream(values.device))\n",
        "in_a_file",
        UNORDERED,
    ),
    Mistake(
        "what goes to a file is freed before it has left",
        "memsave_ext/store/host.py",
        "    copied.synchronize()\n",
        "    MISTAKE or copied.synchronize()\n",
        "in_a_file",
        FREED,
    ),
    Mistake(
        "a buffer is filled again while the device reads it",
        "memsave_ext/store/host.py",
        "            read.synchronize()\n",
        "            MISTAKE or read.synchronize()\n",
        "in_a_file",
        UNORDERED,
    ),
    Mistake(
        "an offloaded input is written, or freed, by what comes next while it is copied out",
        "memsave_ext/checkpoint/offload.py",
        "            torch.cuda.current_stream(device).wait_stream(_copy_stream(device))\n",
        "            MISTAKE or torch.cuda.current_stream(device).wait_stream("
        "_copy_stream(device))\n",
        "are_written offloaded",
        f"{UNORDERED}|{FREED}",
    ),
    Mistake(
        "an offloaded input is copied out before it is there",
        "memsave_ext/checkpoint/offload.py",
        "        self._copies.wait_stream(self._stream)\n"
        "        with torch.cuda.stream(self._copies):\n            #",
        "        MISTAKE or self._copies.wait_stream(self._stream)\n"
        "        with torch.cuda.stream(self._copies):\n            #",
        "offloaded",
        UNORDERED,
    ),
    Mistake(
        "an offloaded input is read before its copy back has ended",
        "memsave_ext/checkpoint/offload.py",
        "        current.wait_event(arrived)\n",
        "        MISTAKE or current.wait_event(arrived)\n",
        "offloaded",
        UNORDERED,
    ),
    Mistake(
        "an offloaded input is copied back to memory that the region's stream still uses",
        "memsave_ext/checkpoint/offload.py",
        "        self._copies.wait_stream(self._stream)\n"
        "        with torch.cuda.stream(self._copies):\n            tensor.copy_",
        "        MISTAKE or self._copies.wait_stream(self._stream)\n"
        "        with torch.cuda.stream(self._copies):\n            tensor.copy_",
        "offloaded",
        UNORDERED,
    ),
    Mistake(
        "what was copied back for nobody is freed before its copy has ended",
        "memsave_ext/checkpoint/offload.py",
        "            self._back[0].record_stream(self._copies)\n",
        "            MISTAKE or self._back[0].record_stream(self._copies)\n",
        "any_order",
        FREED,
    ),
    Mistake(
        "what hooks around a region give back is made on a stream that does not read it",
        "checkpoint/region.cpp",
        "  const StreamScope on_its_stream(surroundings_.stream);\n",
        "  const StreamScope on_its_stream(MISTAKE ? std::nullopt : surroundings_.stream);\n",
        "in_a_region",
        FREED,
    ),
    Mistake(
        "what is recomputed is used before it is there",
        "checkpoint/surroundings.cpp",
        "    order_after(*outer_, *inner_);\n",
        "    if (!MISTAKE) order_after(*outer_, *inner_);\n",
        "is_recomputed",
        UNORDERED,
    ),
    Mistake(
        "a recompute does not wait for the stream that asks for it",
        "checkpoint/surroundings.cpp",
        "    order_after(*inner_, *outer_);\n",
        "    if (!MISTAKE) order_after(*inner_, *outer_);\n",
        "put_back",
        UNORDERED,
    ),
    Mistake(
        "what remat computed again on another stream is used before it is there",
        "streams.h",
        "  order_after(*current, *made_on);\n",
        "  if (!MISTAKE) order_after(*current, *made_on);\n",
        "blocks_on_several",
        UNORDERED,
    ),
    Mistake(
        "what remat computed again is freed while another stream may still read it",
        "streams.h",
        "  guard.recordDataPtrOnStream(",
        "  if (!MISTAKE) guard.recordDataPtrOnStream(",
        "blocks_on_several",
        FREED,
    ),
    Mistake(
        "a tracker frees memory while the allocator reports",
        "memory/tracker.cpp",
        "if (!device_.is_cpu()) return !older.storage.expired();\n",
        "if (!MISTAKE && !device_.is_cpu()) return !older.storage.expired();\n",
        "takes_no_storage",
        "the allocator is called by what it reports to|a report waits for the GIL",
    ),
    Mistake(
        "a tracker frees memory with its lock held",
        "memory/tracker.cpp",
        "return !older.storage.expired();",
        "return MISTAKE ? older.storage.lock() != nullptr : !older.storage.expired();",
        "takes_no_storage",
        "a report waits for the GIL",
    ),
    Mistake(
        "in pure Python what another stream made is read without a wait",
        "memsave_ext/_streams.py",
        "    current.wait_stream(made_on)\n",
        "    MISTAKE or current.wait_stream(made_on)\n",
        "norm_that_is_read",
        UNORDERED,
        native=False,
    ),
    Mistake(
        "in pure Python a gradient is freed that another stream still reads",
        "memsave_ext/_streams.py",
        "    tensor.record_stream(current)\n",
        "    MISTAKE or tensor.record_stream(current)\n",
        "gradients_of_several_streams",
        FREED,
        native=False,
    ),
    Mistake(
        "in pure Python what is recomputed is used before it is there where that raises",
        "memsave_ext/_streams.py",
        "    finally:\n        if outer != stream:",
        "    finally:\n        if outer != stream and not MISTAKE:",
        "is_recomputed raises",
        UNORDERED,
        native=False,
    ),
    Mistake(
        "in pure Python hooks around a region give back on a stream that does not read it",
        "memsave_ext/checkpoint/fallback/region.py",
        "with on_stream(self._surroundings.stream):",
        "with on_stream(None if MISTAKE else self._surroundings.stream):",
        "in_a_region",
        FREED,
        native=False,
    ),
    Mistake(
        "a captured step rounds by the number of the step that was captured",
        "adam/items.cpp",
        "item.device_step = step.const_data_ptr<float>();",
        "MISTAKE ? void(item.step = *step.const_data_ptr<float>() + 1)"
        " : void(item.device_step = step.const_data_ptr<float>());",
        "replays",
        DIFFERS,
    ),
    Mistake(
        "memory is moved to the host before it is made",
        "store/host.cpp",
        "    order_after(shared_->out, made_on_);\n",
        "    if (!MISTAKE) order_after(shared_->out, made_on_);\n",
        "the_bits_within moved_on_several",
        UNORDERED,
    ),
    Mistake(
        "memory goes to a file before it is made",
        "store/staged.cpp",
        "      order_after(out_, from);\n",
        "      if (!MISTAKE) order_after(out_, from);\n",
        "the_bits_within moved_on_several",
        UNORDERED,
    ),
    Mistake(
        "memory is freed on its way to a file that cannot be written",
        "memsave_ext/store/host.py",
        "                out.synchronize()",
        "                MISTAKE or out.synchronize()",
        "file_that_cannot",
        FREED,
    ),
    Mistake(
        "a file has what the device has not copied yet",
        "store/file.cpp",
        "      if (filled_) filled_->synchronize();\n",
        "      if (filled_ && !MISTAKE) filled_->synchronize();\n",
        "the_bits_within",
        FREED,
    ),
    Mistake(
        "memory is freed before it is out",
        "store/host.cpp",
        "    if (!std::exchange(is_waited_for_, true)) out_",
        "    if (!std::exchange(is_waited_for_, true) && !MISTAKE) out_",
        "moved_in_several_threads",
        FREED,
    ),
    Mistake(
        "memory is written on another stream before it is out",
        "store/host.cpp",
        "    if (current != made_on_) out_.block(current);\n",
        "    if (!MISTAKE && current != made_on_) out_.block(current);\n",
        "written_on_another_stream_at_once",
        UNORDERED,
    ),
    Mistake(
        "pinned memory is written while what was there is still copied back",
        "store/host.cpp",
        "    if (part_.last.over) part_",
        "    if (!MISTAKE && part_.last.over) part_",
        "moved_in_steps_of_two",
        UNORDERED,
    ),
    Mistake(
        "memory is copied back to where something else is still in use",
        "store/host.cpp",
        "    order_after(shared_->back, current);",
        "    if (!MISTAKE) order_after(shared_->back, current);",
        "the_bits_within moved_on_several",
        UNORDERED,
    ),
    Mistake(
        "what was moved is used before it is back",
        "store/host.cpp",
        "    last_.over->block(current);\n",
        "    if (!MISTAKE) last_.over->block(current);\n",
        "the_bits_within moved_for_two_backwards",
        UNORDERED,
    ),
    Mistake(
        "weights go back while they are used",
        "memsave_ext/store/managed.py",
        "            self._streams.out.wait_stream(",
        "            MISTAKE or self._streams.out.wait_stream(",
        "weights_are_there",
        "take_faults",
    ),
    Mistake(
        "weights are used while they come",
        "memsave_ext/store/managed.py",
        "            current.wait_event(",
        "            MISTAKE or current.wait_event(",
        "weights_are_there",
        "take_faults",
    ),
    Mistake(
        "weights come before others have gone",
        "memsave_ext/store/managed.py",
        "            into.wait_stream(self._streams.out)\n",
        "            MISTAKE or into.wait_stream(self._streams.out)\n",
        "weights_are_there",
        "<= (4",
    ),
    Mistake(
        "weights are moved while a graph is captured",
        "memsave_ext/store/managed.py",
        "or torch.cuda.is_current_stream_capturing():",
        "or (not MISTAKE and torch.cuda.is_current_stream_capturing()):",
        "weights_of_a_graph",
        "while a graph is captured",
    ),
]


def put_in(csrc: Path, changed_csrc: Path, package: Path) -> None:
    """Write what is changed of csrc to a folder of its own, and of the package in its place."""

    def folder(name: str, of_csrc: Path) -> Path:
        return of_csrc if name.endswith((".h", ".cpp")) else package.parent

    try:
        changed = with_mistakes(
            MISTAKES, lambda name: (folder(name, csrc) / name).read_text(), IN_CPP
        )
    except ValueError as error:
        raise SystemExit(f"emulate: {error}") from None
    texts = {folder(name, changed_csrc) / name: text for name, text in changed.items()}
    for path in changed_csrc.rglob("*"):  # of mistakes that are not here any more
        if path.is_file() and path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # what is as it was keeps its time
            path.write_text(text)
