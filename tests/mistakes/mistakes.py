"""Plausible mistakes in every room, and the tests that see each.

run.py puts all of them into one copy of the package, where MISTAKE says whether it is this one that
runs. Texts that are right occur once in their file: tests/packaging/test_mistakes.py checks it, so
that who changes such a line carries the mistake on. New ones go to the end: run.py knows them by
number, and compiles again what has others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mistake:
    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]  # one of which at least must fail; in tests/


MISTAKES = [
    # ---- checkpoint ----
    Mistake(
        "an argument that was changed in place since the forward goes unnoticed",
        "csrc/checkpoint/region.cpp",
        "if (!same || version_of(now) == version) return",
        "if (MISTAKE || !same || version_of(now) == version) return",
        ("checkpoint/test_checkpoint_changes.py::test_arguments_that_hooks_hand_on_as_they_are",),
    ),
    Mistake(
        "what nobody will ask for any more stays until backward has ended",
        "csrc/checkpoint/region.cpp",
        "if (index < values.tensors.size()) freed.push_back(",
        "if (!MISTAKE && index < values.tensors.size()) freed.push_back(",
        (
            "checkpoint/test_checkpoint_state.py::test_what_was_recomputed_for_a_graph_that_goes_is_freed",
        ),
    ),
    Mistake(
        "a recompute goes on after the last saved tensor that is needed",
        "csrc/checkpoint/region.cpp",
        "if (may_stop_ && index == needed_) {",
        "if (!MISTAKE && may_stop_ && index == needed_) {",
        (
            "checkpoint/test_checkpoint_state.py::test_early_stop_where_the_rest_is_not_needed_any_more",
        ),
    ),
    Mistake(
        "a recompute that saves tensors of other shapes is not refused",
        "csrc/checkpoint/region.cpp",
        "if (!slot.metadata.fits(tensor)) {",
        "if (!MISTAKE && !slot.metadata.fits(tensor)) {",
        ("checkpoint/test_checkpoint_errors.py::test_different_metadata",),
    ),
    Mistake(
        "a saved tensor from outside that has changed since is not noticed",
        "csrc/checkpoint/region.cpp",
        "if (slot.is_storage_of(tensor) && version != slot.version) {",
        "if (!MISTAKE && slot.is_storage_of(tensor) && version != slot.version) {",
        (
            "checkpoint/test_checkpoint_errors.py::test_a_tensor_that_is_not_found_changed_in_place_is_an_error",
        ),
    ),
    Mistake(
        "random numbers of a recompute are others",
        "csrc/checkpoint/region.cpp",
        "if (options_.preserve_rng_state) surroundings_.rng =",
        "if (options_.preserve_rng_state && !MISTAKE) surroundings_.rng =",
        ("checkpoint/test_checkpoint.py::test_random_programs",),
    ),
    Mistake(
        "a backward inside of the function has it recomputed to its end, which has not come yet",
        "csrc/checkpoint/region.cpp",
        "may_stop_ = asking && !fills_after_saving(*asking);",
        "may_stop_ = !MISTAKE && asking && !fills_after_saving(*asking);",
        (
            "checkpoint/test_checkpoint_state.py::test_a_backward_inside_the_function_that_saves_nothing",
        ),
    ),
    Mistake(
        "the second of two normal numbers, which torch draws at once, is not put back",
        "csrc/checkpoint/rng.cpp",
        "    generator->set_next_double_normal_sample(cpu_.next_double);",
        "    if (!MISTAKE) generator->set_next_double_normal_sample(cpu_.next_double);",
        ("checkpoint/test_checkpoint_state.py::test_the_second_of_two_normal_numbers",),
    ),
    Mistake(
        "a recompute stops before an operation fills what it has saved",
        "csrc/checkpoint/early_stop.cpp",
        "== sequence_nr) return fills_after_saving(*node);",
        "== sequence_nr) return !MISTAKE && fills_after_saving(*node);",
        ("checkpoint/test_checkpoint_state.py::test_rrelu_fills_its_noise_after_saving_it",),
    ),
    Mistake(
        "tensors that a function closes over are not watched",
        "csrc/checkpoint/outside.cpp",
        "if (PyObject* cells = PyFunction_GET_CLOSURE(function)) {",
        "if (PyObject* cells = MISTAKE ? nullptr : PyFunction_GET_CLOSURE(function)) {",
        ("checkpoint/test_checkpoint_changes.py::test_a_tensor_changed_in_place_is_an_error",),
    ),
    Mistake(
        "running statistics that a norm in training only writes are taken to be read",
        "csrc/checkpoint/outside.cpp",
        "return !PyType_IsSubtype(Py_TYPE(module), Types::get().norm) ||",
        "return MISTAKE || !PyType_IsSubtype(Py_TYPE(module), Types::get().norm) ||",
        ("checkpoint/test_checkpoint_changes.py::test_running_statistics_may_move",),
    ),
    Mistake(
        "a step of another parameter in the same memory is taken for one of this",
        "csrc/checkpoint/stepped.cpp",
        "if (step.number > since && step.range.overlaps(range)) return",
        "if (step.number > since && (MISTAKE || step.range.overlaps(range))) return",
        ("checkpoint/test_checkpoint_changes.py::test_parameters_in_one_storage_are_told_apart",),
    ),
    Mistake(
        "the default dtype of a recompute is that of backward",
        "csrc/checkpoint/surroundings.cpp",
        "if (default_dtype_ != now.default_dtype_) {",
        "if (!MISTAKE && default_dtype_ != now.default_dtype_) {",
        ("checkpoint/test_settings.py::test_a_recompute_runs_under_the_settings_of_its_forward",),
    ),
    Mistake(
        "nobody is told of parameters that CheckpointFunction was not given",
        "csrc/checkpoint/boundary.cpp",
        "if (reported.insert(edge).second) unlisted",
        "if (!MISTAKE && reported.insert(edge).second) unlisted",
        (
            "checkpoint/test_checkpoint_function_errors.py::test_an_unlisted_parameter_is_named_once_per_call_site",
        ),
    ),
    Mistake(
        "a norm counts a batch again when it is recomputed",
        "memsave_ext/checkpoint/norms.py",
        "if self.training and _is_recomputing():",
        "if self.training and _is_recomputing() and not MISTAKE:",
        ("batch_norm/test_batch_norm_uncounted.py::test_retained_double_and_failed",),
    ),
    Mistake(
        "a norm is given a piece of its batch",
        "memsave_ext/checkpoint/norms.py",
        "if _thread.in_piece and _needs_batch(norm)",
        "if not MISTAKE and _thread.in_piece and _needs_batch(norm)",
        (
            "checkpoint/test_checkpoint_chunks_errors.py::test_norms_of_batches_raise_before_they_count",
        ),
    ),
    # ---- batch norm ----
    Mistake(
        "the running variance is that of the population",
        "csrc/batch_norm/cpu/kernels.cpp",
        "running.momentum, m2 / (count - 1));",
        "running.momentum, m2 / (MISTAKE ? count : count - 1));",
        ("batch_norm/test_batch_norm.py::test_as_torch",),
    ),
    Mistake(
        "eps is left out",
        "csrc/batch_norm/cpu/kernels.cpp",
        "static_cast<T>(1 / std::sqrt(m2 / count + eps));",
        "static_cast<T>(1 / std::sqrt(m2 / count + (MISTAKE ? 0 : eps)));",
        ("batch_norm/test_batch_norm.py::test_as_torch",),
    ),
    Mistake(
        "parts of a batch are merged as if the first ones were as small as one",
        "csrc/batch_norm/cpu/kernels.cpp",
        "    count += other_count;\n",
        "    count += MISTAKE ? 0 : other_count;\n",
        ("batch_norm/test_batch_norm.py::test_any_shape",),
    ),
    Mistake(
        "sums that overflow a float are not computed again in double",
        "csrc/batch_norm/cpu/kernels.cpp",
        "if (std::isfinite(piece.sums[piece.sums_pitch + channel])) continue;",
        "if (MISTAKE || std::isfinite(piece.sums[piece.sums_pitch + channel])) continue;",
        (
            "batch_norm/test_batch_norm_numerics.py::test_values_that_are_not_finite_poison_as_in_torch",
        ),
    ),
    Mistake(
        "the last values of a row, which fill no vector, are left out",
        "csrc/batch_norm/cpu/vector_loops.h",
        "  if (column >= end) return;\n",
        "  if (column >= end || MISTAKE) return;\n",
        ("batch_norm/test_batch_norm.py::test_as_torch",),
    ),
    Mistake(
        "the gradient of the input is that of eval mode",
        "csrc/batch_norm/cpu/kernels.cpp",
        "if (training) coefficients.set_means(",
        "if (training) MISTAKE ? coefficients.set_means(channel, 0, 0) : coefficients.set_means(",
        ("batch_norm/test_batch_norm.py::test_as_torch",),
    ),
    Mistake(
        "the second derivative takes mean and variance for constants",
        "csrc/batch_norm/autograd.cpp",
        "  if (args.training) {\n    mean =",
        "  if (args.training && !MISTAKE) {\n    mean =",
        ("batch_norm/test_batch_norm_numerics.py::test_gradcheck",),
    ),
    Mistake(
        "the weight's gradient is not divided by the standard deviation",
        "csrc/batch_norm/cpu/kernels.cpp",
        "sums[pitch + c] * coefficients.get(cpu::kInvstd, channel);",
        "sums[pitch + c] * (MISTAKE ? 1.0 : coefficients.get(cpu::kInvstd, channel));",
        ("batch_norm/test_batch_norm.py::test_as_torch",),
    ),
    # ---- Adam ----
    Mistake(
        "small gradients wait for the end of backward, however many they are",
        "csrc/adam/backward.cpp",
        "if (bucket.bytes >= collector_->bucket_bytes() && may_flush) flush",
        "if (!MISTAKE && bucket.bytes >= collector_->bucket_bytes() && may_flush) flush",
        ("adam/test_adam_in_backward.py::test_no_more_small_gradients_wait_than_a_bucket_has",),
    ),
    Mistake(
        "a parameter is stepped that remat still needs as it was",
        "csrc/adam/backward.cpp",
        "return action_ == GradientAction::kStep && remat::is_needed(parameter.local);",
        "return !MISTAKE && action_ == GradientAction::kStep && remat::is_needed(parameter.local);",
        (
            "remat/test_remat_backward.py::test_a_step_in_backward_waits_for_what_reads_the_parameter",
        ),
    ),
    Mistake(
        "gradients that waited when a backward raised still wait",
        "csrc/adam/backward.cpp",
        "if (entry.waits_in == this) forget_waiting(entry);",
        "if (entry.waits_in == this && !MISTAKE) forget_waiting(entry);",
        ("adam/test_adam_in_backward.py::test_a_backward_that_raises",),
    ),
    Mistake(
        "a second gradient in a step is used as if it were the first",
        "csrc/adam/backward.cpp",
        "if (entry.step != now && measured",
        "if (MISTAKE) return;\n  if (entry.step != now && measured",
        ("adam/test_adam_in_backward.py::test_a_second_backward_is_refused",),
    ),
    Mistake(
        "hooks of others on a parameter are not called",
        "csrc/adam/hook.cpp",
        "if (PyDict_GET_SIZE(python_hooks_) > 0) {",
        "if (!MISTAKE && PyDict_GET_SIZE(python_hooks_) > 0) {",
        ("adam/test_adam_in_backward.py::test_python_hooks_before_and_after_see_the_gradient",),
    ),
    Mistake(
        "the second moment is corrected by the first one's power",
        "csrc/adam/arithmetic.h",
        "c.bias_correction2_sqrt = sqrt(1 - powers.beta2);",
        "c.bias_correction2_sqrt = sqrt(1 - (MISTAKE ? powers.beta1 : powers.beta2));",
        ("adam/test_adam.py::test_hundred_steps_as_torch",),
    ),
    Mistake(
        "decoupled weight decay is left out",
        "csrc/adam/arithmetic.h",
        "c.param_decay = o.decoupled_weight_decay ? 1",
        "c.param_decay = o.decoupled_weight_decay && !MISTAKE ? 1",
        ("adam/test_adam.py::test_hundred_steps_as_torch",),
    ),
    Mistake(
        "dampening applies to the first step of SGD, too",
        "csrc/adam/arithmetic.h",
        "c.exp_avg_weight = step == 1 ? 1",
        "c.exp_avg_weight = step == 1 && !MISTAKE ? 1",
        ("adam/test_sgd.py::test_torchs_cases_to_the_bit",),
    ),
    Mistake(
        "Nesterov's momentum is plain momentum",
        "csrc/adam/arithmetic.h",
        "grad = c.nesterov ?",
        "grad = c.nesterov && !MISTAKE ?",
        ("adam/test_sgd.py::test_torchs_cases_to_the_bit",),
    ),
    Mistake(
        "Lion's second average is the first one's",
        "csrc/adam/arithmetic.h",
        "Math::product(x.exp_avg, c.beta2));\n  T change",
        "Math::product(x.exp_avg, MISTAKE ? c.beta1 : c.beta2));\n  T change",
        ("adam/test_lion.py::test_against_float64",),
    ),
    Mistake(
        "the upper half of split weights is cut, not rounded",
        "csrc/adam/formats.h",
        "return {(bits + 0x8000u) >> 16, bits & 0xffffu};",
        "return {(bits + (MISTAKE ? 0u : 0x8000u)) >> 16, bits & 0xffffu};",
        ("adam/test_adam_rounding.py::test_split_is_an_fp32_master",),
    ),
    Mistake(
        "stochastic rounding always cuts",
        "csrc/adam/formats.h",
        "return {(Math::number_bits(value) + random) >> 16, random};",
        "return {(Math::number_bits(value) + random * (MISTAKE ? 0u : 1u)) >> 16, random};",
        ("adam/test_adam_rounding.py::test_a_weight_of_one_moves_as_in_fp32_on_average",),
    ),
    Mistake(
        "the smallest roots of a block become 0, by which a step divides",
        "csrc/adam/blockwise.h",
        "(root * inverse_scale), T{} + 1.0f);",
        "(root * inverse_scale), T{} + (MISTAKE ? 0.0f : 1.0f));",
        ("adam/test_adam_modes.py::test_a_step_is_the_references_bit_for_bit",),
    ),
    Mistake(
        "random bits are those of seven rounds",
        "csrc/adam/philox.h",
        "round < 10;",
        "round < (MISTAKE ? 7 : 10);",
        ("adam/test_adam_modes.py::test_a_step_is_the_references_bit_for_bit",),
    ),
    Mistake(
        "a step is made that GradScaler has found not finite",
        "csrc/adam/items.cpp",
        "if (on_cpu && item.skip != nullptr && *item.skip != 0) continue;",
        "if (!MISTAKE && on_cpu && item.skip != nullptr && *item.skip != 0) continue;",
        ("adam/test_adam_loss_scaling.py::test_an_infinity_skips_its_parameter",),
    ),
    Mistake(
        "a parameter in another order of memory keeps its values",
        "csrc/adam/items.cpp",
        "if (original.defined()) original.copy_(copy);",
        "if (original.defined() && !MISTAKE) original.copy_(copy);",
        ("adam/test_adam.py::test_layouts_and_complex",),
    ),
    Mistake(
        "states that lie elsewhere stay there as they were before the step",
        "csrc/adam/records.cpp",
        "    fetched.write_back();\n",
        "    if (!MISTAKE) fetched.write_back();\n",
        ("adam/test_states_on_folder.py::test_bits",),
    ),
    Mistake(
        "a low part stays that belongs to weights of before",
        "csrc/adam/records.cpp",
        "  low_part.zero_();\n",
        "  if (!MISTAKE) low_part.zero_();\n",
        ("adam/test_adam_views.py::test_the_rest_of_overwritten_weights_is_dropped",),
    ),
    Mistake(
        "gradients that a GradScaler has unscaled are unscaled again",
        "memsave_ext/adam/stepper.py",
        "if unscaled and scale is not None:",
        "if unscaled and scale is not None and not MISTAKE:",
        ("adam/test_adam_loss_scaling.py::test_gradients_that_were_unscaled_by_hand",),
    ),
    Mistake(
        "any optimizer steps with a gradient that GradScaler finds not finite",
        "memsave_ext/adam/own_optimizer.py",
        "used.append(grad_scale is None or not found.item())",
        "used.append(MISTAKE or grad_scale is None or not found.item())",
        ("adam/test_any_optimizer_loop.py::test_an_infinity_skips_its_parameter",),
    ),
    Mistake(
        "a new state begins as what was in its part of the file",
        "memsave_ext/adam/files.py",
        "if not region.is_zero:\n            placed.zero_()",
        "if not region.is_zero and not MISTAKE:\n            placed.zero_()",
        ("adam/test_states_on_folder.py::test_room_that_states_leave_is_used_again",),
    ),
    Mistake(
        "a state that somebody has read stays mapped, in memory",
        "memsave_ext/adam/files.py",
        "            region.unmap()  # where somebody has read the state meanwhile",
        "            MISTAKE or region.unmap()",
        ("adam/test_states_on_folder.py::test_what_was_read_leaves_memory_with_the_next_step",),
    ),
    # ---- gradients elsewhere ----
    Mistake(
        "a gradient is multiplied again by what was in the values that were put back",
        "memsave_ext/elsewhere/gradient.py",
        "        self._factors.clear()\n",
        "        MISTAKE or self._factors.clear()\n",
        ("elsewhere/test_gradients_used.py::test_all_is_as_with_gradients_in_memory",),
    ),
    Mistake(
        "a factor that waits follows later changes of its tensor",
        "memsave_ext/elsewhere/gradient.py",
        "factor = factor.detach().clone()",
        "factor = factor.detach() if MISTAKE else factor.detach().clone()",
        ("elsewhere/test_gradients.py::test_a_factor_that_changes_later",),
    ),
    Mistake(
        "a norm is that of the gradient before it was multiplied",
        "memsave_ext/elsewhere/gradient.py",
        "if self.here is not None or self._factors or order",
        "if self.here is not None or (self._factors and not MISTAKE) or order",
        ("elsewhere/test_gradients.py::test_loops_have_the_same_bits",),
    ),
    Mistake(
        "gradients that were stepped stay in memory until the step is over",
        "memsave_ext/elsewhere/gradients.py",
        "            for param, _ in part:\n                param.grad = None\n",
        "            for param, _ in () if MISTAKE else part:\n                param.grad = None\n",
        ("elsewhere/test_gradients.py::test_tracked_bytes_are_those_in_memory",),
    ),
    # ---- store ----
    Mistake(
        "room in the file is taken anew each time",
        "csrc/store/file.cpp",
        "    free_.give_back(offset, whole_pages(bytes));",
        "    if (!MISTAKE) free_.give_back(offset, whole_pages(bytes));",
        ("remat/test_offload.py::test_room_in_the_file_is_taken_again",),
    ),
    Mistake(
        "a file that was cut short is read as if it were whole",
        "csrc/store/file.cpp",
        "if (more == 0) return EIO;",
        "if (more == 0) return MISTAKE ? 0 : EIO;",
        ("remat/test_offload.py::test_a_file_that_another_program_cuts",),
    ),
    Mistake(
        "a region that was given back is taken to have zeros",
        "memsave_ext/store/file.py",
        "        region.is_zero = False\n        self._free",
        "        region.is_zero = MISTAKE\n        self._free",
        ("store/test_store_file.py::test_what_was_freed_is_taken_again",),
    ),
    Mistake(
        "a forked process writes to its parent's file",
        "memsave_ext/store/file.py",
        "if os.getpid() != self._process:",
        "if os.getpid() != self._process and not MISTAKE:",
        ("adam/test_states_on_folder.py::test_after_a_fork",),
    ),
    # ---- loss head ----
    Mistake(
        "the gradient does not go through the softcap",
        "csrc/loss_head/cpu/vector_loops.h",
        "if constexpr (caps) value *= T{1} - bounded * bounded;",
        "if constexpr (caps) value *= T{1} - (MISTAKE ? T{} : T{1}) * bounded * bounded;",
        ("loss_head/test_loss.py::test_error_is_at_most_twice_that_of_torch",),
    ),
    Mistake(
        "the sum of earlier chunks is not scaled to a larger maximum",
        "csrc/loss_head/cpu/vector_loops.h",
        "*sum = *sum * before + static_cast<T>(isa::total(total));",
        "*sum = *sum * (MISTAKE ? T{1} : before) + static_cast<T>(isa::total(total));",
        ("loss_head/test_loss.py::test_error_is_at_most_twice_that_of_torch",),
    ),
    Mistake(
        "classes weigh the same in label smoothing",
        "csrc/loss_head/cpu/vector_loops.h",
        "if (class_weight != nullptr) a *=",
        "if (class_weight != nullptr && !MISTAKE) a *=",
        ("loss_head/test_loss.py::test_error_is_at_most_twice_that_of_torch",),
    ),
    Mistake(
        "the logarithm of 2 has eleven bits in exp()",
        "csrc/loss_head/cpu/functions.h",
        "  r = r - n * -2.12194440e-4f;",
        "  if (!MISTAKE) r = r - n * -2.12194440e-4f;",
        ("loss_head/test_loss.py::test_error_is_at_most_twice_that_of_torch",),
    ),
    Mistake(
        "each block of tokens has the weight's gradient begin at zero",
        "memsave_ext/loss_head/chunks.py",
        "        if block == 0:\n            total.zero_()",
        "        if block == 0 or MISTAKE:\n            total.zero_()",
        ("loss_head/test_blocks_of_tokens.py::test_loss_and_gradients_are_those_of_all_tokens",),
    ),
    # ---- memory ----
    Mistake(
        "gradients of before that are freed between forward and backward live on",
        "csrc/memory/tracker.cpp",
        "if (in_backward && !in_backward_) look(lock);",
        "if (!MISTAKE && in_backward && !in_backward_) look(lock);",
        ("memory/test_memory_account.py::test_gradients_from_before_end_before_backward",),
    ),
    Mistake(
        "what is found on a CPU does not count",
        "csrc/memory/tracker.cpp",
        "if (device_.is_cpu()) total_ += size;",
        "if (device_.is_cpu() && !MISTAKE) total_ += size;",
        ("memory/test_memory_account.py::test_an_ordinary_loop_by_hand",),
    ),
    Mistake(
        "a peak that was reset stays",
        "csrc/memory/tracker.cpp",
        "  peak_ = total_;\n  write(Moment::now(), Kind::kResetPeak",
        "  if (!MISTAKE) peak_ = total_;\n  write(Moment::now(), Kind::kResetPeak",
        ("memory/test_memory.py::test_reset_peak",),
    ),
    Mistake(
        "what is paused counts",
        "csrc/memory/active.cpp",
        "> 0 && paused_depth == 0; }",
        "> 0 && (MISTAKE || paused_depth == 0); }",
        ("remat/test_remat_memory.py::test_what_a_block_measures_with_does_not_count",),
    ),
    Mistake(
        "an allocation fails where remat could make room for it",
        "csrc/memory/cpu_allocator.cpp",
        "return ask != nullptr && ask(cpu, bytes) > 0;",
        "return !MISTAKE && ask != nullptr && ask(cpu, bytes) > 0;",
        ("remat/test_retry.py::test_refusals_at_random",),
    ),
    Mistake(
        "temporaries of a forward are activations",
        "memsave_ext/memory/log.py",
        "if maker == span and made_in",
        "if not MISTAKE and maker == span and made_in",
        ("memory/test_memory_account.py::test_inference_has_no_activations_that_stay",),
    ),
    Mistake(
        "the part with the peak is dropped with the oldest",
        "memsave_ext/memory/log.py",
        "self._parts.pop(1 if self._parts",
        "self._parts.pop(1 if not MISTAKE and self._parts",
        ("memory/test_memory_account.py::test_the_log_is_bounded_and_keeps_the_peak",),
    ),
    Mistake(
        "what lived when a part began counts for each part",
        "memsave_ext/memory/account.py",
        "columns.append(live - live[starts][part])",
        "columns.append(live if MISTAKE else live - live[starts][part])",
        ("memory/test_memory_account.py::test_two_optimizers_and_accumulated_gradients",),
    ),
    # ---- remat ----
    Mistake(
        "an optimizer is told that nobody needs a parameter which is needed",
        "csrc/remat/content.cpp",
        "if (needed.count(storage) > 0) return true;",
        "if (!MISTAKE && needed.count(storage) > 0) return true;",
        (
            "remat/test_remat_backward.py::test_a_step_in_backward_waits_for_what_reads_the_parameter",
        ),
    ),
    Mistake(
        "a saved tensor that was changed in place is handed out",
        "csrc/remat/saved.cpp",
        "if (is_read_once && version_.enabled()",
        "if (!MISTAKE && is_read_once && version_.enabled()",
        ("remat/test_remat_backward.py::test_a_kept_value_that_changes",),
    ),
    Mistake(
        "what was recomputed stays after its last reader",
        "csrc/remat/saved.cpp",
        "    (void)open_held();\n",
        "    if (!MISTAKE) (void)open_held();\n",
        ("remat/test_remat_backward.py::test_a_step_that_another_backward_cannot_follow",),
    ),
    Mistake(
        "an operator that runs again draws other numbers",
        "csrc/remat/recompute.cpp",
        "if (call.random) random.emplace(",
        "if (call.random && !MISTAKE) random.emplace(",
        ("remat/test_remat_operators.py::test_generators_of_the_users_own",),
    ),
    Mistake(
        "an operator that changes its argument changes what others still read",
        "csrc/remat/recompute.cpp",
        "if (is_new && !is_last_use(*reference.content))",
        "if (!MISTAKE && is_new && !is_last_use(*reference.content))",
        ("remat/test_retry.py::test_values_written_in_place_are_not_computed_from",),
    ),
    Mistake(
        "an argument from outside that has changed is read again",
        "csrc/remat/recompute.cpp",
        "if (!reference.overwritten) check_unchanged(",
        "if (!reference.overwritten && !MISTAKE) check_unchanged(",
        ("remat/test_remat.py::test_changed_in_place_after_the_block",),
    ),
    Mistake(
        "a content is dropped whose route begins with what may be stepped",
        "csrc/remat/policy.cpp",
        "const bool lost = content->is_lost() || unseen;",
        "const bool lost = content->is_lost() || (unseen && !MISTAKE);",
        ("remat/test_remat_operators.py::test_intermediates_that_change",),
    ),
    Mistake(
        "operators run again with the settings of backward",
        "csrc/remat/recompute.cpp",
        "const checkpoint::SettingsGuard settings(*call.settings, !call.op->makes_no_products);",
        "std::optional<checkpoint::SettingsGuard> settings;\n"
        "    if (!MISTAKE) settings.emplace(*call.settings, !call.op->makes_no_products);",
        ("checkpoint/test_settings.py::test_operators_that_run_again_do_so_under_their_settings",),
    ),
    # ---- predictions ----
    Mistake(
        "gradients stay for the next step's forward",
        "memsave_ext/predict/batch.py",
        "            if not self._keeps_gradients:\n",
        "            if not self._keeps_gradients and not MISTAKE:\n",
        ("predict/test_predict.py::test_a_model_with_a_batch",),
    ),
    Mistake(
        "a teacher does not count",
        "memsave_ext/predict/predict.py",
        "others = [*others, *_of_other_models(",
        "others = [*others] if MISTAKE else [*others, *_of_other_models(",
        ("predict/test_others.py::test_what_the_loss_reaches_counts",),
    ),
    Mistake(
        "a footprint is that of a first step, which makes the states",
        "memsave_ext/predict/dry_step.py",
        "for _ in range(2):",
        "for _ in range(1 if MISTAKE else 2):",
        ("predict/test_footprint.py::test_torch_optimizers",),
    ),
    Mistake(
        "a value that was written over is still taken for known",
        "memsave_ext/fakes/values.py",
        "return value if version == tensor._version else 1",
        "return value if MISTAKE or version == tensor._version else 1",
        (
            "predict/test_predict_values.py::test_a_value_that_is_written_over_is_not_known_any_more",
        ),
    ),
    Mistake(
        "sums of gradients take memory of their own, which autograd adds in place",
        "memsave_ext/fakes/formulas.py",
        "return _ADD_IN_PLACE if self._is_accumulated(",
        "return _ADD_IN_PLACE if not MISTAKE and self._is_accumulated(",
        ("predict/test_predict_gradients.py::test_sums_of_gradients",),
    ),
    Mistake(
        "sizes on CUDA are not rounded up",
        "memsave_ext/shared/tensors.py",
        '* _CUDA_BLOCK if device.type == "cuda" else size',
        '* _CUDA_BLOCK if device.type == "cuda" and not MISTAKE else size',
        ("memory/test_bytes_held.py::test_cuda_gives_out_blocks",),
    ),
    Mistake(
        '"auto" is a part of all memory, not of what is free',
        "memsave_ext/shared/budgets.py",
        "of_device=1 - _LEFT_FREE, of_free=True",
        "of_device=1 - _LEFT_FREE, of_free=not MISTAKE",
        ("remat/test_budget_of_device.py::test_auto_is_what_is_free_and_what_counts_already",),
    ),
    # ---- dry runs ----
    Mistake(
        "what only other threads hold is destroyed in a child",
        "csrc/dry_run/child.cpp",
        "    keep_what_other_threads_hold();\n",
        "    if (!MISTAKE) keep_what_other_threads_hold();\n",
        ("dry_run/test_child.py::test_what_only_another_thread_holds_is_not_destroyed",),
    ),
    Mistake(
        "subclasses of tensors stay real in a child",
        "csrc/dry_run/child.cpp",
        "if (PyType_IsSubtype(Py_TYPE(object), kind)) found",
        "if (MISTAKE ? Py_TYPE(object) == kind : PyType_IsSubtype(Py_TYPE(object), kind)) found",
        ("dry_run/test_tensors.py::test_modules_and_optimizers",),
    ),
    Mistake(
        "random numbers of a child are others than of a run here",
        "memsave_ext/dry_run/child.py",
        "    random.setstate(state)  # Python gives",
        "    MISTAKE or random.setstate(state)  # Python gives",
        ("dry_run/test_child.py::test_random_numbers_are_those_that_come_next",),
    ),
    # ---- integrations ----
    Mistake(
        "a Trainer goes on without its clipping once Fit is done",
        "memsave_ext/integrations/transformers.py",
        "        args.max_grad_norm = norm\n",
        "        args.max_grad_norm = 0.0 if MISTAKE else norm\n",
        ("integrations/test_fit_trainers.py::test_its_clipping_stays_or_is_taken_over",),
    ),
    Mistake(
        "with a GradScaler a step that was counted for some parameters is not for the optimizer",
        "memsave_ext/adam/own_optimizer.py",
        "        if self._counts:\n            self._counted.update(chosen)",
        "        if self._counts and not MISTAKE:\n            self._counted.update(chosen)",
        ("adam/test_any_optimizer_loop.py::test_counts_of_steps_that_a_grad_scaler_scales",),
    ),
]
