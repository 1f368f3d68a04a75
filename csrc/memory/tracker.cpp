#include "memory/tracker.h"

#ifndef _WIN32
#include <pthread.h>
#endif

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <system_error>
#include <thread>

#include "memory/cpu_allocator.h"
#include "memory/cuda_reports.h"

namespace memsave_ext::memory {
namespace py = pybind11;
namespace {

constexpr size_t kMany = 100'000;  // events, of 56 bytes, after which they are read
constexpr size_t kTaken = 1'000;   // at once

std::atomic<int> readers{0};  // threads of read_soon()
std::atomic<bool> ends{false};

// Waits for the GIL in a thread of its own, as a thread that reports memory must not wait for it.
void read_soon(std::shared_ptr<py::object> read) {
#ifndef _WIN32
  // A forked process does not have the threads.
  static const int installed = pthread_atfork(nullptr, nullptr, [] { readers = 0; });
  (void)installed;
#endif
  ++readers;
  auto run = [read = std::move(read)]() mutable {
    {
      const py::gil_scoped_acquire gil;
      try {
        (*read)();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("reading events of memory");
      }
      read.reset();
    }
    --readers;
  };
  try {
    if (ends) throw std::system_error();
    std::thread(std::move(run)).detach();  // no reference stays here, without the GIL
  } catch (const std::system_error&) {     // no more threads: next time, or when somebody asks
    --readers;
  }
}

}  // namespace

void end_reading() {
  ends = true;
  while (readers > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// In malloc's heap what is written down would lie between tensors, outlive them and leave the heap
// in pieces, in which malloc searches longer. Never destroyed: other threads write to the end.
std::pmr::memory_resource* Tracker::pool() {
  static auto* const pool = new std::pmr::synchronized_pool_resource();
  return pool;
}

Tracker::~Tracker() {
  TrackingLock lock;
  if (!running_) return;
  remove_active(this);
  if (device_.is_cpu()) unwatch_cpu_allocator();
}

void Tracker::start(std::optional<int64_t> total, py::object read) {
  TORCH_INTERNAL_ASSERT(!running_);  // memsave_ext/memory/tracking.py refuses it
  TrackingLock lock;
  if (device_.is_cpu())
    watch_cpu_allocator();
  else
    watch_cuda_reports();
  if (stacks_) watch_operators(takes_stacks_of_operators());
  thread_ = std::this_thread::get_id();
  total_ = total.value_or(total_);
  peak_ = std::max(peak_, total_);
  moved(Moment::now(), moved_bytes(device_));
  write(Moment::now(), Kind::kBeginTracking, nullptr, 0);
  read_ = std::make_shared<py::object>(std::move(read));
  add_active(this);
  running_ = true;
}

void Tracker::check_stop() const {
  TORCH_CHECK(!running_ || device_.is_cpu() || watches_cuda_reports(),
              "memory tracking of a CUDA device cannot stop: it was not started on this thread");
  // Operators are watched by the thread that asks for it.
  TORCH_CHECK(!running_ || !stacks_ || thread_ == std::this_thread::get_id(),
              "memory tracking with stacks=True cannot stop: it was not started on this thread");
}

void Tracker::stop() {
  if (!running_) return;  // an interrupt came before it was started
  check_stop();
  std::shared_ptr<py::object> read;  // released once the mutex is unlocked
  TrackingLock lock;
  look(lock);
  remove_active(this);
  running_ = false;
  read.swap(read_);
  if (stacks_) unwatch_operators(takes_stacks_of_operators());
  if (!device_.is_cpu())
    unwatch_cuda_reports();
  else
    unwatch_cpu_allocator();
}

void Tracker::note(int32_t kind, int64_t subject, int64_t value) {
  const Moment moment = Moment::now();
  TrackingLock lock;
  write(moment, static_cast<Kind>(kind), subject, value, -1);
}

void Tracker::label(const std::vector<at::Tensor>& tensors, int64_t category,
                    const std::vector<int32_t>& names) {
  TORCH_CHECK(names.size() == tensors.size(), "one name for each tensor");
  TrackingLock lock;
  for (size_t i = 0; i < tensors.size(); ++i) label(tensors[i], category, names[i]);
}

void Tracker::label(const at::Tensor& tensor, int64_t category, int32_t name) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.device() != device_) return;
  const at::Storage& storage = tensor.storage();
  void* ptr = const_cast<void*>(storage.data());
  if (ptr == nullptr || storage.nbytes() == 0) return;
  auto known = blocks_.find(ptr);
  if (known != blocks_.end() && known->second.labelled) return;
  const Moment moment = Moment::now();
  if (known == blocks_.end()) {
    const auto size = static_cast<int64_t>(storage.nbytes());
    known = blocks_.emplace(ptr, Block{size, true, false}).first;
    older_.push_back({ptr, storage.getWeakStorageImpl()});
    // The CUDA allocator's own figure includes it already.
    if (device_.is_cpu()) total_ += size;
    if (running_) peak_ = std::max(peak_, total_);
    write(moment, Kind::kFound, ptr, size);
  }
  known->second.labelled = true;
  write(moment, Kind::kLabelled, ptr, category + 16 * int64_t{name});
}

void Tracker::look() {
  TrackingLock lock;
  look(lock);
}

void Tracker::look(TrackingLock& lock) {
  if (!running_) return;  // what is freed once tracking has ended does not count
  const auto gone = [&](const Older& older) {
    if (is_there(older, lock)) return false;
    const auto known = blocks_.find(older.ptr);
    // Otherwise its address belongs to another block by now.
    if (known != blocks_.end() && known->second.before)
      remove(Moment::now(), known, device_.is_cpu() ? std::nullopt : std::optional(total_));
    return true;
  };
  older_.erase(std::remove_if(older_.begin(), older_.end(), gone), older_.end());
}

bool Tracker::is_there(const Older& older, TrackingLock& lock) const {
  // CUDA's allocator reports memory that a living storage gives up, so it is enough that the
  // storage lives. It is not locked here, because ours could become the last reference: releasing
  // that calls the allocator, which may be what called this.
  if (!device_.is_cpu()) return !older.storage.expired();
  auto storage = older.storage.lock();
  if (!storage) return false;
  const bool same = storage->data() == older.ptr;
  lock.release_after(std::move(storage));
  return same;
}

int64_t Tracker::live() {
  TrackingLock lock;
  look(lock);
  return total_;
}

int64_t Tracker::peak() const {
  TrackingLock lock;
  return peak_;
}

void Tracker::reset_peak() {
  TrackingLock lock;
  look(lock);
  peak_ = total_;
  write(Moment::now(), Kind::kResetPeak, nullptr, 0);
}

std::pair<py::bytes, std::vector<std::shared_ptr<Origin>>> Tracker::take() {
  std::string events;
  std::vector<std::shared_ptr<Origin>> origins;
  {
    TrackingLock lock;
    const size_t count = std::min(events_.size(), kTaken);
    events.reserve(count * sizeof(Event));
    for (size_t i = 0; i < count; ++i, events_.pop_front()) {
      const Event& event = events_.front();
      events.append(reinterpret_cast<const char*>(&event), sizeof(Event));
      if (!stacks_ || event.kind != Kind::kAllocated) continue;
      origins.push_back(std::const_pointer_cast<Origin>(origins_.front()));  // as pybind11 asks
      origins_.pop_front();
    }
  }
  return {py::bytes(events), std::move(origins)};
}

void Tracker::allocated(const Moment& moment, void* ptr, int64_t size, std::optional<int64_t> total,
                        const std::shared_ptr<const Origin>& origin, TrackingLock& lock) {
  // If the address is already known, its block was freed without a report.
  if (const auto known = blocks_.find(ptr); known != blocks_.end())
    remove(moment, known, total.has_value() ? std::optional(total_) : std::nullopt);
  // Gradients from before tracking may be freed between forward and backward, where no hook runs:
  // look for them when backward begins, and before what may be gone counts in a new peak.
  const bool in_backward = moment.node != Moment::kNotInBackward;
  const bool raises_peak = !total.has_value() && total_ + size > peak_;
  if ((in_backward && !in_backward_) || raises_peak) look(lock);
  in_backward_ = in_backward;
  blocks_.emplace(ptr, Block{size, false, false});
  total_ = total.value_or(total_ + size);
  peak_ = std::max(peak_, total_);
  write(moment, Kind::kAllocated, ptr, size);
  if (stacks_) origins_.push_back(origin);
}

void Tracker::freed(const Moment& moment, void* ptr, std::optional<int64_t> total) {
  if (const auto known = blocks_.find(ptr); known != blocks_.end()) {
    remove(moment, known, total);
  } else if (total.has_value() && total_ != *total) {
    total_ = *total;
    peak_ = std::max(peak_, total_);
    write(moment, Kind::kFreed, ptr, 0);
  }
}

void Tracker::remove(const Moment& moment, Blocks::iterator it, std::optional<int64_t> total) {
  total_ = total.value_or(total_ - it->second.size);
  peak_ = std::max(peak_, total_);
  write(moment, Kind::kFreed, it->first, 0);
  blocks_.erase(it);
}

void Tracker::recompute(const Moment& moment, checkpoint::Again what, bool begins) {
  write(moment, begins ? Kind::kBeginRecompute : Kind::kEndRecompute,
        what == checkpoint::Again::kRegion ? 1 : 0, 0, -1);
}

void Tracker::moved(const Moment& moment, int64_t bytes) {
  write(moment, Kind::kMoved, nullptr, bytes);
}

void Tracker::write(const Moment& moment, Kind kind, int64_t subject, int64_t value,
                    int64_t total) {
  events_.push_back({kind, moment, subject, value, total});
  Moment& written = events_.back().moment;
  written.time = time_ = std::max(time_, written.time);
  if (events_.size() % kMany == 0 && read_) read_soon(read_);
}

}  // namespace memsave_ext::memory
