// One `with remat()`: records the operators of its thread, and keeps or drops what they save.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "remat/content.h"

namespace memsave_ext::remat {

// Why a saved tensor's memory is kept.
enum class Verdict : int {
  kDropped,
  kInput,     // made outside of the block: a parameter, an input
  kNotAgain,  // random numbers, a collective, a kernel or a region that is not seen
  kHeavy,     // bound by arithmetic
  kNoGain,    // computing it again would keep about as much, or is not cheap for its size
};
// What a block drops. Nothing: to measure what recording costs; everything that can be computed
// again: for tests.
enum class Drops { kNothing, kCheap, kEverything };

constexpr int32_t kNoModule = -1;

// For the report: contents that were saved, or operators that ran again.
struct Sum {
  int64_t count = 0, bytes = 0;
  double seconds = 0;  // for the saved: to compute them again, as measured in the forward
};
using Maker = std::pair<int32_t, const Operator*>;  // a module and its operator, if one was seen
using Sums = std::map<std::pair<Maker, Verdict>, Sum>;
using SumsAgain = std::map<Maker, Sum>;

class Block {
 public:
  explicit Block(Drops drops) : drops_(drops) {}

  // Of this thread, until close(). Blocks nest: the inner one records.
  void open();
  void close();
  bool is_innermost() const;  // of this thread
  static Block* active();     // which records, of this thread, or null

  // A tensor that autograd saves: its content now has one holder more. Null where the tensor is to
  // be kept as it is.
  std::shared_ptr<Content> save(const at::Tensor& tensor);

  // Of its own thread; of others (replicas of a module) they are ignored.
  void enter_module(int32_t number);
  void leave_module();

  int64_t recorded() const { return recorded_; }
  Sums sums() const;
  SumsAgain sums_again();  // not with the GIL
  void count_again(const Call& call, double seconds);
  // Held while values are computed again. Never awaited with the GIL held.
  std::recursive_mutex& again_mutex() { return again_mutex_; }

 private:
  struct Recording : at::ObserverContext {  // an operator that runs
    Block* block;
    uint64_t born = 0;           // how many contents there were before it
    std::shared_ptr<Call> call;  // null: it is not recorded
    bool repeatable = false;
    // What it writes, and the versions before.
    c10::SmallVector<std::pair<at::Tensor, uint32_t>, 2> written;
    std::chrono::steady_clock::time_point begin;

    bool writes(const c10::StorageImpl* storage) const;
    void measure(double seconds, const at::RecordFunction& function);
  };
  struct Entry {
    std::shared_ptr<Content> content;  // now
    // Of the tensor by which it was last seen, shared with its views, and what it was then: they
    // tell changes that no operator of this thread made.
    c10::VariableVersion counter;
    uint32_t version = 0;

    void see(const at::Tensor& tensor);
  };

  static std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function);
  static void on_end(const at::RecordFunction& function, at::ObserverContext* context);

  std::unique_ptr<Recording> start(const Operator& op, const at::RecordFunction& function);
  void end(Recording& recording, const at::RecordFunction& function);
  void keep_mask(Recording& recording);
  void end_unrecorded(const at::RecordFunction& function);
  void note_hidden_writes(const Operator& op, const at::RecordFunction& function);
  void before_write(const at::Tensor& tensor);
  Entry& renew(const at::Tensor& tensor);
  Entry& entry_of(const at::Tensor& tensor);
  bool is_new_for_running(const Content& content) const;
  bool is_being_written(const Content& content) const;
  bool refer(Recording& recording, const at::Tensor& tensor, size_t argument, int64_t element);
  void made(Recording& recording, const at::Tensor& tensor, size_t output, int64_t element);
  void decide(const std::shared_ptr<Content>& content);
  void sweep();

  const Drops drops_;
  std::unordered_map<const c10::StorageImpl*, Entry> table_;
  size_t sweep_at_ = 1024;
  std::vector<Recording*> running_;  // operators of this thread, innermost last
  std::thread::id thread_;
  std::vector<int32_t> modules_{kNoModule};
  Sums sums_;  // with contents_mutex()
  int64_t recorded_ = 0;
  SumsAgain sums_again_;  // with again_mutex_
  std::recursive_mutex again_mutex_;
  Block* outer_ = nullptr;
  at::CallbackHandle callback_ = 0;
};

// While values are computed again nothing is recorded.
class Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
};

}  // namespace memsave_ext::remat
