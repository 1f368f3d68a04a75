// One `with remat()`: records the operators of its thread and keeps or drops what autograd saves.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "locks.h"
#include "remat/content.h"
#include "remat/give_way.h"
#include "remat/known.h"
#include "remat/modules.h"
#include "remat/move.h"
#include "remat/policy.h"
#include "remat/proof.h"
#include "remat/step.h"
#include "remat/tally.h"

namespace memsave_ext::remat {

class Block final : public Giver, public std::enable_shared_from_this<Block> {
 public:
  // `store`: where contents may be moved to, at most `most_moved` bytes; null: nowhere.
  explicit Block(Drops drops, const std::shared_ptr<store::Store>& store = nullptr,
                 int64_t most_moved = std::numeric_limits<int64_t>::max());
  explicit Block(Budget budget);

  // Has what operators make told apart by the modules that call them. Called before open().
  void tell_modules(std::shared_ptr<Modules> modules) { modules_ = std::move(modules); }

  // Records this thread's operators until close(). Blocks nest: only the innermost records.
  // `bytes`: the budget's, where they were not known before. `retry`: allocations that fail, here
  // or on any other thread, are tried again once it has given memory back.
  void open(std::optional<int64_t> bytes = std::nullopt, bool retry = false);
  void close();
  // Its thread has ended and never left it. Later steps are not to be counted beside its own.
  void abandon();
  // Records nothing and saves nothing until resume(), as if it were not open: other blocks may open
  // and close meanwhile. It is this thread's innermost one.
  void suspend();
  void resume();
  bool is_innermost() const;  // on this thread
  static Block* active();     // the one that records on this thread now, or null
  // Those that are open on this thread, the innermost first.
  static std::vector<std::shared_ptr<Block>> all_open();
  // It records nothing while more of these were begun than ended.
  void begin_pause() { ++pauses_; }
  void end_pause() { --pauses_; }
  bool is_paused() const { return pauses_ > 0; }

  // Called for a tensor that autograd saves. Adds a holder to its content; without one the tensor
  // itself is to be kept.
  struct Saving {
    std::shared_ptr<Content> content;
    uint64_t fill = 0;    // the content's
    int32_t number = -1;  // of the tensor among those that the step has saved
  };
  Saving save(const at::Tensor& tensor);

  // Called when autograd opens what save() returned. The step goes on until that backward ends,
  // where optimizers that step in backward may still make their states.
  void opened(const Content& content, int32_t number);
  // Called for what save() returned, when its holder is gone.
  void released(const Content& content, int32_t number, bool was_last);
  Mover* mover() const { return mover_.get(); }  // null where nothing is moved
  Step* step() const { return step_.get(); }     // null without a budget, and before open()

  // A Function's forward that is declared to be pure (see functions.h) begins, with these tensors
  // and what calls it again. Null: nothing is to be told of it. Called on the block's thread, as
  // are end() and cancel(), of which one follows.
  class RunningFunction;
  static std::unique_ptr<RunningFunction> begin_function(const Operator& op,
                                                         const std::vector<c10::IValue>& inputs);

  int64_t give_way(c10::Device device, int64_t enough, Gives what) override;

  int64_t operators() const { return recorded_ + passed_; }
  int64_t passed() const { return passed_; }  // of these: were not recorded, as a script has it
  Tally tally();                              // until now; call it without the GIL
  void ran_again(const Call& call, double seconds) { tally_.ran_again(call, seconds); }
  // Held during a recompute. Do not wait for it with the GIL held.
  RecursiveLock& again_mutex() { return again_mutex_; }

 private:
  struct Given {  // a tensor that a Function is given, and its place among them
    at::Tensor tensor;
    size_t position;
    uint64_t bits;
  };
  struct Recording : at::ObserverContext {  // an operator that is running
    Block* block;
    uint64_t born = 0;           // contents_so_far() when it began: later ones are new in it
    std::shared_ptr<Call> call;  // null: only its results, or what it writes, are noted
    bool repeatable = false;     // whether its results may be recomputed from `call`
    bool is_mask = false;        // its result is kept as bits, in place of random numbers
    Step::Began began;           // empty without a step
    struct Written {
      at::Tensor tensor;
      uint32_t version;                 // before
      const c10::StorageImpl* storage;  // before: set_() gives the tensor another

      bool has_other_storage() const { return storage_of(tensor) != storage; }
    };
    c10::SmallVector<Written, 2> written;
    std::vector<Writing> writing;                         // the same, until they have new contents
    c10::SmallVector<const c10::StorageImpl*, 4> inputs;  // of one that is not recorded
    bool is_function = false;  // an autograd.Function's, which runs its forward
    // What was made in it; null where that is not asked for.
    std::unique_ptr<std::vector<std::shared_ptr<Content>>> made;
    // Of what it was given: what could be recomputed, with the bits before.
    std::vector<Given> given;
    FunctionKey key;
    std::unique_ptr<const Proof> proof;       // of a library's operator, where it is due
    double begin = 0;                         // by now()
    std::unique_ptr<DeviceTime> device_time;  // null where it is not asked for

    bool is_of_factory() const { return call != nullptr && call->op->is_factory; }
    bool writes(const c10::StorageImpl* storage) const;
    void measure(const std::vector<c10::IValue>& outputs);
  };
  struct Entry {
    std::shared_ptr<Content> content;  // what the storage holds now
    // The version counter of the tensor through which it was last seen (shared with its views), and
    // its value then. They reveal changes that no operator of this thread made.
    c10::VariableVersion counter;
    uint32_t version = 0;

    void see(const at::Tensor& tensor);
  };

  static std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function);
  static void on_end(const at::RecordFunction& function, at::ObserverContext* context);
  void watch(bool sees_results);
  // Whether the step goes by a script.
  bool has_script() const { return step_ && step_->has_script(); }
  bool passes(const Operator& op, c10::ArrayRef<const c10::IValue> inputs, bool is_recorded);

  std::unique_ptr<Recording> start(const Operator& op, c10::ArrayRef<const c10::IValue> inputs);
  bool is_in_library() const;
  int32_t running_module() const;
  bool is_repeatable(Recording& recording, c10::ArrayRef<const c10::IValue> inputs) const;
  void note_settings(Call& call);
  void note_arguments(Recording& recording, c10::ArrayRef<const c10::IValue> inputs);
  void begin_proof(Recording& recording, c10::ArrayRef<const c10::IValue> inputs);
  void end_proof(Recording& recording, const std::vector<c10::IValue>& outputs);
  std::unique_ptr<Recording> start_write(const Operator& op, const at::RecordFunction& function);
  void begin_write(Recording& recording, const at::Tensor& tensor);
  void end_write(Recording& recording);
  void end(Recording& recording, const std::vector<c10::IValue>& outputs);
  static std::unique_ptr<Recording> begin_scope(const at::RecordFunction& function);
  void look_at_given(Recording& scope, const at::RecordFunction& function);
  bool may_be_repeated(const at::Tensor& tensor) const;
  void renew_everywhere(const at::Tensor& tensor);
  bool is_given(const Content& content) const;
  void end_scope(Recording& scope);
  void keep_mask(Recording& recording);
  void end_unrecorded(Recording& recording, const at::RecordFunction& function);
  void note_hidden_writes(const Operator& op, const at::RecordFunction& function);
  void note_hidden_write(const at::Tensor& tensor);
  void before_write(const at::Tensor& tensor);
  Entry& renew(const at::Tensor& tensor);
  std::shared_ptr<Content> make_content(const at::Tensor& tensor, bool external);
  Entry& entry_of(const at::Tensor& tensor);
  bool is_new_for_running(const Content& content) const;
  bool refer(Recording& recording, const at::Tensor& tensor, size_t argument, int64_t element);
  void made(Recording& recording, const at::Tensor& tensor, size_t output, int64_t element);
  void decide(const std::shared_ptr<Content>& content);
  Route route_to(const Content& content, Freed& locked) const;
  void drop(const std::shared_ptr<Content>& content, Route route, Freed& freed);
  void take_route(const std::shared_ptr<Content>& content, Route route);
  void route_again(const std::shared_ptr<Content>& content, Freed& freed,
                   std::vector<std::shared_ptr<Content>>& contents);
  int64_t drop_late(const std::shared_ptr<Content>& content, Gives what, Freed& freed,
                    Freed& locked);
  void drop_later(const std::shared_ptr<Content>& content);
  struct Dropped {
    int64_t bytes = 0, contents = 0;
  };
  Dropped drop_oldest(c10::Device device, int64_t enough, Gives what);
  void let_go();
  void move_out();
  void settle_moves(const Content* opened = nullptr);
  void sweep();

  const Drops drops_;
  std::optional<Budget> budget_;
  // Set while it is open; where it gives way, until all of its contents are gone, as it may drop
  // them in backward.
  std::optional<checkpoint::Pending> pending_;
  std::unique_ptr<Step> step_;
  std::unique_ptr<Mover> mover_;
  bool moves_next_ = false;  // of kBoth
  // Of its contents; and itself while it is open, and backwards that open its contents.
  std::atomic<int64_t> holders_{1};
  std::atomic<int> backward_{-1};  // number of the latest backward that opened a content
  ska::flat_hash_map<const c10::StorageImpl*, Entry> table_;
  size_t sweep_at_ = 1024;  // size of table_ at which freed storages are removed
  std::shared_ptr<const checkpoint::Settings> settings_;  // of the operator recorded last
  std::vector<Recording*> scopes_;    // autograd.Functions that run, innermost last
  std::vector<Recording*> running_;   // recorded operators that run, innermost last
  std::shared_ptr<Modules> modules_;  // null where they are not told apart, and once it is closed
  Tally tally_;
  int64_t recorded_ = 0, passed_ = 0;
  RecursiveLock again_mutex_{LockOrder::kRecompute};
  // Why what is needed could not be copied before an operator wrote it. Guarded, as what follows,
  // by contents_mutex().
  std::exception_ptr copy_failed_;
  // What may be dropped after it was decided on, the oldest first.
  std::vector<std::weak_ptr<Content>> later_;
  size_t sweep_later_at_ = 1024;  // size of later_ at which those that are gone are removed
  Block* outer_ = nullptr;
  int pauses_ = 0;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  bool sees_results_ = false;          // of operators, at their ends
  std::optional<GivesWay> gives_way_;  // last: it ends before what it gives
};

class Block::RunningFunction {
 public:
  RunningFunction(std::shared_ptr<Block> block, std::unique_ptr<Recording> recording,
                  std::vector<at::Tensor> given)
      : block_(std::move(block)), recording_(std::move(recording)), given_(std::move(given)) {}
  ~RunningFunction() { cancel(); }
  RunningFunction(const RunningFunction&) = delete;
  RunningFunction& operator=(const RunningFunction&) = delete;

  // With its results, and what else it has saved. None: it is not pure.
  void end(const std::vector<at::Tensor>& results);
  // It was left by an exception.
  void cancel();

 private:
  const std::shared_ptr<Block> block_;
  std::unique_ptr<Recording> recording_;  // null once it is over
  const std::vector<at::Tensor> given_;
};

}  // namespace memsave_ext::remat
