"""Builds the native part with a sanitizer and runs its tests with it.

    python tools/sanitize.py address    # AddressSanitizer and UndefinedBehaviorSanitizer
    python tools/sanitize.py thread     # ThreadSanitizer

Everything is put in build/sanitize-KIND; the installed package is left alone. Python and torch are
not built with the sanitizer. AddressSanitizer sees our own accesses all the same, and every heap
block. ThreadSanitizer knows of the order that mutexes make, in whatever library; what torch orders
with atomic operations it cannot see, so accesses made in torch's libraries are not reported.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
LIBRARIES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
# By room, as test_NAME.py.
TESTS = {
    "checkpoint": "checkpoint checkpoint_state checkpoint_errors checkpoint_function "
    "checkpoint_function_state checkpoint_function_errors",
    "batch_norm": "batch_norm batch_norm_numerics batch_norm_once batch_norm_errors",
    "adam": "adam adam_in_backward adam_hooks adam_modes adam_rounding adam_states adam_clipping "
    "adam_loss_scaling adam_op states_on_folder",
    "loss_head": "loss loss_autograd",
    "remat": "remat remat_backward remat_blocks remat_modules remat_repeated budget script offload",
    "memory": "memory memory_account",
    "dry_run": "child tensors",
    "store": "store_file",
    "elsewhere": "gradients gradients_used",
}
# Other tests that threads are in.
TESTS_OF_THREADS = {
    "checkpoint": "checkpoint_chunks_changes models_changed_in_place",
    "batch_norm": "batch_norm_made_inside",
    "adam": "adam_concurrent any_optimizer_errors unused_gradients",
    "remat": "budget_ahead retry user_code",
    "memory": "memory_locks memory_inside",
    "predict": "predict_around",
    "distributed": "replicas",
}
# AddressSanitizer keeps freed memory for a while, which the first of these tests would take for
# growth; it needs more than a limit of the system leaves it, ends a process that reads at a bad
# address in its own way, and forks for longer than a child may take. The last ones run torch's
# operators, for minutes. The threads of OpenMP have an order that ThreadSanitizer does not see;
# threads that train one model race for the running statistics of its batch norms, as with torch's.
EXPRESSION = {
    "address": "not host_memory and not the_systems_bytes and not resident_bytes"
    " and not within_a_limit"
    " and not children_that_die and not a_child_in_a_child and not every_operator_has_the_values",
    "thread": "(thread or at_once or concurrent or together) and not number_of_threads"
    " and not one_model_in_all_threads",
}
# race_top: by the innermost frame, as torch and Python are on every stack, ours included. The other
# races are not ours either. glibc frees the thread-local memory of a thread that has ended in
# another that takes its stack. Whoever drops the last reference to a node of torch, which atomic
# operations count, frees it. Each thread that makes a graph of a parameter notes in the parameter's
# node that it has a parent: a function of torch's headers, compiled here. oneDNN's cache of kernels
# is its own affair.
SUPPRESSIONS = """\
race_top:libtorch
race_top:libc10
race_top:libpython
race_top:^Py
race_top:^_Py
mutex:native_sharding_propagator
mutex:capsule_dealloc
race:_dl_deallocate_tls
race:torch::autograd::Node::~Node
race:c10::weak_intrusive_ptr<torch::autograd::Node
race_top:torch::autograd::Node::topological_nr
race:dnnl::impl::
"""


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "g++")
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"sanitize: {compiler} has no {name}; install its sanitizer libraries")
    return path


def build(kind: str, folder: Path) -> None:
    package = folder / "memsave_ext"
    ignored = shutil.ignore_patterns("_C.*.so", "_build_info.json", "__pycache__")
    for path in package.rglob("*.py"):
        path.unlink()  # one that is not there any more
    shutil.copytree(ROOT / "memsave_ext", package, ignore=ignored, dirs_exist_ok=True)
    flags = f"{FLAGS[kind]} -g1 -DMEMSAVE_EXT_CHECK_LOCKS=LocksHeld::abort"
    environment = {**os.environ, "MEMSAVE_EXT_CUDA": "0", "CXXFLAGS": flags}
    environment["LDFLAGS"] = FLAGS[kind]
    environment["CFLAGS"] = environment["CXXFLAGS"]
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(folder), "--build-temp", str(folder / "objects")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def test(kind: str, folder: Path) -> int:
    for old in folder.glob("report.*"):
        old.unlink()
    suppressions = folder / "suppressions.txt"
    suppressions.write_text(SUPPRESSIONS)
    options = {
        # Python leaves much allocated at exit; our own leaks have tests.
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        # Free of quotes: a path with a space would end the option.
        "TSAN_OPTIONS": f"suppressions={suppressions.name}:log_path=report:exitcode=66",
    }
    environment = {
        **os.environ,
        **options,
        "LD_PRELOAD": " ".join(library(name) for name in LIBRARIES[kind]),
        "PYTHONPATH": str(folder),
        "PYTHONMALLOC": "malloc",  # so that every Python object is a block of its own
        "MEMSAVE_EXT_NATIVE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--full", "--rootdir", str(ROOT), "-k", EXPRESSION[kind]]
    for tests in (TESTS, TESTS_OF_THREADS) if kind == "thread" else (TESTS,):
        command += [
            str(ROOT / f"tests/{room}/test_{name}.py")
            for room in tests
            for name in tests[room].split()
        ]
    if kind == "thread" and shutil.which("setarch"):
        # Its shadow memory needs addresses where they used to be.
        command = ["setarch", platform.machine(), "-R", *command]
    # Saved tensors go through Python in the first run and bypass it in the second.
    status = max(
        abs(subprocess.run([*command, *more], cwd=folder, env=environment, check=False).returncode)
        for more in ([], ["--engine-hooks"])
    )
    stress = [sys.executable, str(ROOT / "tests/stress/run.py"), "--part", "backwards"]
    stress += ["--native", "1", "--count", "40", "--minutes", "10", "--seed", "0"]
    stress = [*command[: command.index(sys.executable)], *stress]  # with setarch, where it is used
    print("== concurrent backwards", flush=True)
    ended = subprocess.run(stress, cwd=folder, env=environment, check=False)
    status = max(status, abs(ended.returncode))
    for report in folder.glob("report.*"):  # in files: pytest swallows what a passing test prints
        print(report.read_text())
        status = max(status, 1)  # also of a process that a test has started
    return status


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind not in FLAGS:
        sys.exit(f"usage: sanitize.py {'|'.join(FLAGS)}")
    folder = ROOT / "build" / f"sanitize-{kind}"
    build(kind, folder)
    print(f"== tests under the {kind} sanitizer", flush=True)
    sys.exit(test(kind, folder))


if __name__ == "__main__":
    main()
