#include "memory/record.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <initializer_list>
#include <unordered_map>

namespace memsave_ext::memory {
namespace {

at::Tensor as_table(const std::vector<int64_t>& values, int64_t columns) {
  at::Tensor table = at::empty({static_cast<int64_t>(values.size()) / columns, columns}, at::kLong);
  std::copy(values.begin(), values.end(), table.mutable_data_ptr<int64_t>());
  return table;
}

}  // namespace

Record::Record(const Log& log) {
  std::vector<int64_t> change_rows;
  std::vector<int64_t> block_rows;
  const auto add = [](std::vector<int64_t>& rows, std::initializer_list<int64_t> row) {
    rows.insert(rows.end(), row);
  };
  std::unordered_map<const Block*, int64_t> rows;
  const auto row = [&](const std::shared_ptr<Block>& block) -> int64_t {
    if (!block) return -1;
    const auto [found, is_new] = rows.emplace(block.get(), static_cast<int64_t>(rows.size()));
    if (is_new) {
      add(block_rows, {block->size, static_cast<int64_t>(block->category()),
                       static_cast<int64_t>(block->phase), block->name, block->module});
      origins_.push_back(block->origin);
    }
    return found->second;
  };
  for (const Part& part : log.parts()) {
    // One row marks the part's beginning, even where nothing lives; its phase is the part's number.
    add(change_rows, {part.time, part.step, -1, 2, part.number, part.total});
    for (const auto& block : part.live)
      add(change_rows, {part.time, part.step, row(block), 2, 0, part.total});
    for (const Event& event : part.events)
      add(change_rows, {event.time, part.step, row(event.block), event.freed ? -1 : 1,
                        static_cast<int64_t>(event.phase), event.total});
  }
  changes = as_table(change_rows, 6);
  blocks = as_table(block_rows, 5);
  for (const auto& [key, region] : log.threads().regions())
    regions.emplace_back(static_cast<int32_t>(key.first), key.second, region.calls,
                         region.saved_bytes, static_cast<double>(region.nanoseconds) * 1e-9);
}

const Origin* Record::origin(int64_t block) const {
  TORCH_CHECK_INDEX(block >= 0 && block < static_cast<int64_t>(origins_.size()), "no block ", block,
                    " among ", origins_.size());
  return origins_[block].get();
}

std::string Record::operator_name(int64_t block) const {
  const Origin* const found = origin(block);
  return found == nullptr ? std::string() : found->operator_name;
}

std::vector<std::tuple<std::string, int64_t, std::string>> Record::stack(int64_t block) const {
  std::vector<std::tuple<std::string, int64_t, std::string>> frames;
  const Origin* const found = origin(block);
  if (found == nullptr || !found->stack) return frames;
  const torch::SymbolizedTracebacks symbols = torch::symbolize({found->stack.get()});
  for (const uint64_t i : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames.at(i);
    frames.emplace_back(frame.filename, static_cast<int64_t>(frame.lineno), frame.funcname);
  }
  return frames;
}

}  // namespace memsave_ext::memory
