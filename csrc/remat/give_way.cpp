#include "remat/give_way.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "locks.h"
#include "memory/make_room.h"

namespace memsave_ext::remat {
namespace {

// It is taken where the lock of a device's allocator may be held: rule 4 of CONTRIBUTING.md. What
// is freed is on that device, so that nobody waits for the lock of another device's allocator.
Lock& givers_mutex() {
  static auto& mutex = *new Lock(LockOrder::kBlocks);  // they may outlive static destruction
  return mutex;
}
auto& givers = *new std::vector<Giver*>();

int64_t make_room(c10::Device device, int64_t enough) {
  int64_t bytes = 0;
  const std::lock_guard<Lock> lock(givers_mutex());
  for (const Gives what : {Gives::kShort, Gives::kRecomputed, Gives::kAny}) {
    for (Giver* giver : givers) {
      if (bytes < enough) bytes += giver->give_way(device, enough - bytes, what);
    }
  }
  return bytes;
}

}  // namespace

GivesWay::GivesWay(Giver& giver) : giver_(giver) {
  const std::lock_guard<Lock> lock(givers_mutex());
  givers.push_back(&giver);
  memory::make_room = &make_room;
}

GivesWay::~GivesWay() {
  const std::lock_guard<Lock> lock(givers_mutex());
  givers.erase(std::find(givers.begin(), givers.end(), &giver_));
  if (givers.empty()) memory::make_room = nullptr;
}

}  // namespace memsave_ext::remat
