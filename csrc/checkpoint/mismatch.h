// What a recompute did differently from its forward, in words. Messages begin with torch's own, so
// that code which matches them keeps working.
#pragma once

#include <string>

#include "checkpoint/region.h"

namespace memsave_ext {

c10::SmallVector<int64_t, 4> describe_sizes(const at::Tensor& tensor);
c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const at::Tensor& tensor);
uint32_t version_of(const at::Tensor& tensor);  // 0 of inference tensors, which have none

bool same_metadata(const Slot& slot, const at::Tensor& tensor);
bool is_storage(const Slot& slot, const at::Tensor& tensor);

std::string describe_difference(size_t index, const Slot& slot, const at::Tensor& tensor);
std::string describe_versions(uint32_t in_forward, uint32_t in_recompute);
std::string describe_mutation(size_t index, const Slot& slot, const at::Tensor& tensor);

std::string difference_message(const std::string& differences);
std::string mutation_message(const std::string& mutations);
std::string more_saved_message();
std::string fewer_saved_message(size_t saved, size_t recomputed);

// Throws memsave_ext.CheckpointError. `on_error`, unless None, may add to the message.
[[noreturn]] void throw_checkpoint_error(const std::string& message,
                                         const pybind11::object& on_error);

}  // namespace memsave_ext
