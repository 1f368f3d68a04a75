#include "remat/give_way.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "locks.h"
#include "memory/make_room.h"
#include "remat/block.h"

namespace memsave_ext::remat {
namespace {

// It is taken where the lock of a device's allocator may be held. Under it nobody allocates, and
// nobody waits for the lock of another device's allocator: what is freed is on that device.
Lock& blocks_mutex() {
  static auto& mutex = *new Lock(LockOrder::kBlocks);  // blocks may outlive static destruction
  return mutex;
}
auto& blocks = *new std::vector<Block*>();

int64_t make_room(c10::Device device, int64_t enough) {
  int64_t bytes = 0;
  const std::lock_guard<Lock> lock(blocks_mutex());
  for (const Gives what : {Gives::kShort, Gives::kRecomputed, Gives::kAny}) {
    for (Block* block : blocks) {
      if (bytes < enough) bytes += block->give_way(device, enough - bytes, what);
    }
  }
  return bytes;
}

}  // namespace

GivesWay::GivesWay(Block& block) : block_(block) {
  const std::lock_guard<Lock> lock(blocks_mutex());
  blocks.push_back(&block);
  memory::make_room = &make_room;
}

GivesWay::~GivesWay() {
  const std::lock_guard<Lock> lock(blocks_mutex());
  blocks.erase(std::find(blocks.begin(), blocks.end(), &block_));
  if (blocks.empty()) memory::make_room = nullptr;
}

}  // namespace memsave_ext::remat
