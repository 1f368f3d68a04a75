// Every kernel of batch norm beside its definition, and beside itself in other orders of threads:
// the same bits.
#include <cstdio>

#include "batch_norm_run.h"

namespace emulation {
namespace {

void run(const Case& of, const std::vector<Order>& orders) {
  Run run(of);
  std::vector<Memory> first;
  for (const Order order : orders) {
    use(order, of.channels);
    std::vector<Memory> results = run.results(order == orders[0]);
    for (const Memory& result : results) result.require_nothing_in_front();
    if (order == orders[0]) {
      first = std::move(results);
      continue;
    }
    for (size_t i = 0; i < results.size(); ++i) {
      if (first_difference(first[i], results[i]) >= 0)
        fail("batch norm: other bits in result %zu", i);
      checks += static_cast<int64_t>(results[i].count());
    }
  }
}

void run_all(const Options& options) {
  // Channels first: on chip, in chunks, of every width of vectors. Channels last: in groups that
  // are full and not.
  std::vector<Case> shapes = {
      {{}, 1, 1, 2},    {{}, 2, 3, 35},   {{}, 2, 3, 49},   {{}, 5, 3, 25},  {{}, 9, 5, 9},
      {{}, 1, 2, 13},   {{}, 3, 4, 196},  {{}, 4, 130, 8},  {{}, 3, 130, 9}, {{}, 2, 1, 1},
      {{}, 2, 2, 8256}, {{}, 3, 2, 8257}, {{}, 6000, 1, 3}, {{}, 5, 3, 1},   {{}, 33, 8, 1},
      {{}, 40, 67, 1},  {{}, 1, 40, 1},   {{}, 600, 16, 1}, {{}, 700, 4, 1}, {{}, 300, 9, 1},
      {{}, 1, 15, 1},   {{}, 20, 342, 1}, {{}, 9, 497, 1}};
  if (options.large) {
    for (const Case& one : {Case{{}, 64, 128, 49}, Case{{}, 16, 130, 196}, Case{{}, 2, 3, 300'000},
                            Case{{}, 100'000, 12, 1}, Case{{}, 2, 128, 20'000}}) {
      shapes.push_back(one);
    }
  }
  // 48 KiB of shared memory, and what the kernels declare themselves; before any that takes more,
  // since a kernel that was once allowed more stays allowed.
  for (const Case& of :
       {Case{DType::kFloat, 64, 128, 64, 1, true, true}, Case{DType::kDouble, 38, 128, 160}}) {
    run(of, {options.orders[0]});
  }
  run({DType::kDouble, 41, 128, 50, 1, true, true, 0}, options.orders);
  // One channel more than multiprocessors: on chip, with two blocks on each, but for the backward
  // that keeps three tensors, for which one has room. Chunks take that.
  for (const bool residual : {false, true}) {
    run({DType::kDouble, 61, 133, 80, 1, residual}, {options.orders[0]});
  }
  int number = 0;
  for (Case of : shapes) {
    ++number;
    for (int dtype = 0; dtype < 4; ++dtype) {
      of.dtype = static_cast<DType>(dtype);
      for (int variant = 0; variant < 5; ++variant) {
        // Of a part, the plainest and one of the others.
        if (options.part && variant > 0 && (variant + number + dtype) % 4 != 0) continue;
        of.activation = variant % 3;
        of.residual = variant % 2 == 1;
        of.affine = variant > 0;
        of.offset = variant == 2 ? 1 : variant == 3 ? 4 : variant == 4 ? 3 : 0;
        of.input_offset = variant == 4 ? 2 : 0;
        of.affine_like_input = dtype >= 2 && variant != 1;
        run(of, options.orders);
      }
    }
  }
}

}  // namespace
}  // namespace emulation

int main(int argc, char** argv) {
  const emulation::Options options = emulation::options_of(argc, argv);
  emulation::run_all(options);
  printf("batch norm: the largest error is %.2f of its bound\n", emulation::worst_share);
  emulation::finish(options, "batch norm");
}
