// GraphRng of a build with CUDA, by what torch's generators offer in public. They do not let a
// captured generator be set back, but its state can be exchanged (graphsafe_set_state), also for
// one made by hand, as it is here: with the same addresses, at another place.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "checkpoint/rng.h"
#include "compat.h"

namespace memsave_ext::checkpoint {
namespace {

at::TensorBase scalar_at(int64_t* address, c10::Device device) {
  return at::for_blob(address, {1})
      .options(c10::TensorOptions(device).dtype(at::kLong))
      .target_device(device)
      .make_tensor();
}

void exchange_state(at::Generator& generator, const at::Generator& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.graphsafe_set_state(state);
}

}  // namespace

std::optional<GraphRng> GraphRng::current() {
  if (!cuda_in_use()) return std::nullopt;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  // Without a context nothing is captured. A device keeps the one it has.
  static std::atomic<c10::DeviceIndex> known{-1};
  if (known != stream.device_index()) {
    if (!c10::cuda::hasPrimaryContext(stream.device_index())) return std::nullopt;
    known = stream.device_index();
  }
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream.stream(), &status, &capture));
  if (status != cudaStreamCaptureStatusActive) return std::nullopt;
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(stream.device_index());
  const std::lock_guard<std::mutex> lock(generator.mutex());
  // Asked for no numbers, it only says where the next ones would be from.
  const auto now = generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(0);
  return GraphRng{capture, generator, now.seed_.ptr, now.offset_.ptr, now.offset_intragraph_};
}

GraphRngScope::GraphRngScope(const GraphRng& rng)
    : generator_(rng.generator), outer_(generator_.graphsafe_get_state()) {
  auto state = c10::make_intrusive<at::CUDAGeneratorState>();
  set_captured_place(*state, rng.capture, scalar_at(rng.seed, rng.generator.device()),
                     scalar_at(rng.offset, rng.generator.device()), rng.place);
  exchange_state(generator_, at::make_generator<at::CUDAGeneratorImpl>(generator_.device().index(),
                                                                       std::move(state)));
}

GraphRngScope::~GraphRngScope() { exchange_state(generator_, outer_); }

}  // namespace memsave_ext::checkpoint
