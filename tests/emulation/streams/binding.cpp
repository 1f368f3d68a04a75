// What fake_cuda.py calls, and mistakes.
#include <cstdlib>
#include <cstring>

#include "ATen/cuda/CUDAGeneratorImpl.h"
#include "device.h"
#include "managed.h"
#include "mistake.h"

namespace {

struct CudaGraph {
  uint64_t number;
  std::shared_ptr<emulated::Graph> graph;
};

}  // namespace

namespace emulated {

bool is_mistaken(int number) {
  static const char* const chosen = std::getenv("MEMSAVE_EXT_MISTAKE");
  return chosen != nullptr && std::atoi(chosen) == number;
}

}  // namespace emulated

extern "C" {

// The caller frees it.
char* emulated_take_failures() { return strdup(emulated::take_failures().c_str()); }

void emulated_begin_capture() { emulated::begin_capture(); }

void* emulated_end_capture() {
  const uint64_t number = emulated::capture();
  return new CudaGraph{number, emulated::end_capture()};
}

bool emulated_is_capturing() { return emulated::capture() != 0; }

void emulated_refuse_waits(bool refuses) { emulated::refuses_waits = refuses; }

void emulated_record_history(bool records) { emulated::records_history = records; }

void emulated_choose_attention(int64_t kind) { emulated::chosen_attention = kind; }

int64_t emulated_bytes_allocated() { return emulated::bytes_allocated(); }

void emulated_limit_memory(size_t bytes) { emulated::limit_memory(bytes); }

bool emulated_has_waited(int64_t stream, int64_t other) {
  return emulated::has_waited(stream, other);
}

int64_t emulated_take_faults() { return emulated::take_faults(); }

int64_t emulated_take_most_managed() { return emulated::take_most_managed(); }

int64_t emulated_questions() { return emulated::questions(); }

int64_t emulated_recorded_events() { return emulated::recorded_events(); }

void emulated_allocate_for_a_moment(size_t bytes) { emulated::allocate_for_a_moment(bytes); }

void emulated_check_lock_of_stats(bool check) { emulated::check_lock_of_stats(check); }

void emulated_stop_next_allocation() { emulated::stop_next_allocation(); }

void emulated_wait_until_it_has_stopped() { emulated::wait_until_it_has_stopped(); }

bool emulated_let_it_end(double seconds) { return emulated::let_it_end(seconds); }

void emulated_generator_state(uint64_t* seed_and_offset) {
  const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator();
  seed_and_offset[0] = generator.current_seed();
  seed_and_offset[1] = generator.get_offset();
}

void emulated_set_generator_state(const uint64_t* seed_and_offset) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator();
  generator.set_current_seed(seed_and_offset[0]);
  generator.set_offset(seed_and_offset[1]);
}

void emulated_seed(uint64_t seed) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator();
  generator.set_current_seed(seed);
}

void emulated_replay(const CudaGraph* graph) {
  const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator();
  generator.get<at::CUDAGeneratorImpl>()->replay_prologue(graph->number);
  emulated::replay(*graph->graph, emulated::current_stream());
}
}
