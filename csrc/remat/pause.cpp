#include "remat/pause.h"

namespace memsave_ext::remat {
namespace {

thread_local int pauses = 0;

}  // namespace

Pause::Pause() { ++pauses; }
Pause::~Pause() { --pauses; }
bool Pause::is_on() { return pauses > 0; }

}  // namespace memsave_ext::remat
