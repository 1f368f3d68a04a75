// One step within a budget: follows the plan of an earlier step with the same operators and shapes,
// and writes down what happens, for the steps to come. A step whose plan has proved itself goes by
// its script instead: what the plan does not need is not looked at.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "locks.h"
#include "plan/move.h"
#include "plan/plan.h"
#include "remat/account.h"
#include "remat/content.h"
#include "remat/known.h"
#include "remat/policy.h"

namespace memsave_ext::remat {

// What limits a step; with neither bytes nor a share nothing does, and what is cheap is dropped.
struct Budget {
  int64_t bytes = 0;
  // Where positive: the budget is what the step needs without activations, and this share of the
  // activations of a step that keeps everything.
  double share = 0;
  bool strict = false;   // a step that cannot keep to it is refused
  bool is_more = false;  // `bytes` are added to those that lived before the step
  at::Device device{at::kCPU};
  // Where contents may be moved to, and how many bytes of them; null: nowhere.
  std::shared_ptr<store::Store> store = nullptr;
  int64_t most_moved = 0;

  bool is_limit() const { return bytes > 0 || share > 0; }
};

class Step {
 public:
  // `may_pass`: whether it may go by a script.
  Step(Budget budget, bool may_pass);
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // Whose step it is, by a number; 0: nobody's. Called before anything is decided.
  void of_model(int64_t number) { model_ = number; }
  // Counts memory from before: parameters and states, and parameters' gradients. `missing`: bytes
  // of gradients that backward will make.
  void count(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients,
             int64_t missing);

  // Whether a storage is a second one on memory that was allocated in this step, as numpy or DLPack
  // hand it back.
  bool is_alias(const c10::Storage& storage) const;

  // Called by the block in forward.
  struct Began {
    uint64_t key = 0;               // a hash of the operator and the shapes of its arguments
    std::optional<double> seconds;  // that it takes, where the step that is followed knows
    int32_t position = -1;          // among the operators of the trace
    int32_t module = -1;            // that calls it, with a script
  };
  Began began(const Operator& op, c10::ArrayRef<const c10::IValue> inputs);
  // Whether it goes by a script, in which began() and ended() are called for operators alone that
  // must_record() says. What it asks and changes is this thread's: no lock is taken.
  bool has_script() const { return script_ != nullptr; }
  bool all_pass() const { return script_->all_pass; }
  // An operator is called by the factory that began last, and is none of the step's.
  void inner_began();
  // With a script by which all pass, whether the operator that begins is one of these: the end of a
  // factory that passes is not heard of.
  bool passes_inner() { return inner_ > 0 && inner_-- > 0; }
  // Called for each operator, with a script. Leaves it where the operator is another one, or has
  // arguments of other types or sizes, or follows on another number of saved tensors.
  bool must_record(const Operator& op, c10::ArrayRef<const c10::IValue> inputs);
  // Called for each tensor that autograd saves. False: it stays with autograd.
  bool must_pack();
  int32_t latest_save() const { return saves_ - 1; }
  // Called for each of them of which a content is known.
  void saved(Content& content);
  // What was recorded is forgotten: the step begins where a module is called, which is what ran
  // ahead. False, and nothing is, where something was decided on before.
  bool restart();
  // The block is left; more may be allocated before its backward begins.
  void left();
  // Starts to measure how long an operator takes on a device; null where that is known by now.
  std::unique_ptr<DeviceTime> start_time(uint64_t key, at::Device device);
  // Around a second run of an operator, to which no later step will come: its memory counts for
  // the step's peak alone.
  void begin_proof();
  void end_proof();
  // An autograd.Function that has ended keeps these contents without having saved them yet.
  void keeps(const std::vector<std::shared_ptr<Content>>& contents);
  // `call`: null where its results cannot be recomputed. `time`: see start_time(). Returns how many
  // bytes are to be freed now, where there is no plan; 0 for none.
  int64_t ended(Call* call, const Began& began, std::unique_ptr<DeviceTime> time);
  Choice decide(Content& content);
  void decided(const Content& content, Verdict verdict);
  // A content that was to be decided on cannot be recomputed.
  void must_keep(const Content& content);
  // Throws torch's OutOfMemoryError where the budget is strict and the plan exceeds it.
  void check() const;

  // What a plan that moves contents asks for now, in forward or where a content was opened first.
  struct Moves {
    // So many bytes may still be there of those that are being copied and count from a moment
    // before this one on.
    int32_t moment;
    int64_t may_linger;
    std::vector<std::shared_ptr<Content>> come_back;  // begin to
  };
  Moves moves(const Content* opened) const;

  // Called for saved tensors in backward, with their number among these. The first two are called
  // around a recompute.
  bool opened(const Content& content, int32_t save);  // whether for the first time in the step
  // Called around each operator of a recompute.
  void repeats();
  void repeated(const Call& call);
  void recomputed();  // or moved
  // Memory of the device was given back while an operator ran. On any thread, where the lock of the
  // device's allocator may be held.
  void gave_way(at::Device device);
  void is_no_example() { is_exact_ = false; }  // of steps of its shapes
  void closed(const Content& content, int32_t save, bool was_last);
  // Memory that the block holds no more, but a node that runs still uses.
  void given_up(const Freed& memory);
  // The step is over: the forward has ended and all its saved tensors are gone.
  void finish();
  // It is over, and no plan is to be made of it: a backward of it has raised, or the thread of its
  // forward has ended within the block. Does nothing after finish().
  void abandon();

  // Figures, in bytes; 0 where they are not known yet.
  int64_t peak();         // until now
  int64_t least() const;  // the lowest peak that a plan reaches
  int64_t budget() const;
  int64_t before() const;  // that lived before the step
  // Whether its plan exceeds the budget and nobody has asked this for steps like this one.
  bool is_newly_short();
  // The most bytes in each of the moments until now.
  std::vector<int64_t> curve() const;
  std::optional<plan::Plan> plan() const;
  std::shared_ptr<const Known> followed() const;  // whose plan it follows; null where it has none
  std::vector<plan::Plan> plans() const;          // those that it has to choose from
  double waiting() const;                         // seconds, as planned, that it waits for copies
  const std::shared_ptr<int64_t>& alone() const { return alone_; }  // see Content::alone
  std::optional<Deviation> deviation() const;  // from the plan; none before the step's end
  // Calls visit(content, verdict) for those of the trace that have passed.
  void each_passed(
      const std::function<void(const plan::TraceContent& content, Verdict verdict)>& visit) const;
  plan::Trace trace() const;
  KnownSteps::Numbers known() const { return shared_->numbers(); }

 private:
  // The caller of these holds mutex_.
  int32_t number_of(Content& content);
  int32_t add_bits(const at::Tensor& bits);
  void trace_call(Call& call, const Began& began);
  double time_of(Call& call, const Began& began);
  void look_what_is_emptied();
  void look_what_is_held(std::optional<int32_t> moment);
  Count::Bytes take(std::optional<int32_t> mark = std::nullopt);
  int64_t add_moment();  // returns how much less lives now than did at most since take()
  void end_moment();
  // In bytes; 0 where it is a share.
  int64_t limit() const { return budget_.bytes + (budget_.is_more ? before_ : 0); }
  int64_t excess() const;
  void find();
  void follow(std::shared_ptr<Known> known);
  void stop();
  void forget();
  bool decided_like(const plan::Plan* before, int32_t contents) const;
  void begin_script(const Content& content);
  Choice by_script(Content& content) const;
  Verdict why_kept(int32_t content) const;
  void leave_script();
  int64_t planned_peak() const;
  bool is_as_planned() const;
  bool kept_to_budget() const;
  void compare(const plan::Trace& trace);

  const Budget budget_;
  const std::shared_ptr<KnownSteps> shared_;
  Count::Peak since_look_;
  // See KnownSteps::begin(); 0 within no budget, where their memory does not count.
  const int others_;
  mutable Lock mutex_{LockOrder::kStep};
  plan::Trace trace_;
  std::vector<uint64_t> keys_;                    // see Known
  uint64_t hash_ = 0;                             // of all operators until now
  std::vector<uint64_t> calls_;                   // keys of operators, by position in trace_.calls
  std::unordered_map<uint64_t, double> fastest_;  // seconds by the host's clock, by key
  std::vector<TimeOfKey> times_;                  // on devices
  std::vector<std::weak_ptr<Content>> contents_;  // by position in trace_.contents
  std::vector<Verdict> verdicts_;                 // likewise
  std::vector<int32_t> not_let_go_;               // positions
  struct OnContext {
    size_t number;  // its position in trace_.on_context
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<Content> content;
  };
  std::vector<OnContext> on_context_;  // whose memory is there still
  // Positions of those without a call whose memory is there still, with it.
  std::vector<std::pair<int32_t, c10::weak_intrusive_ptr<c10::StorageImpl>>> sources_;
  const std::shared_ptr<int64_t> alone_ = std::make_shared<int64_t>(0);  // see Content::alone
  // Memory that counts as the block's though no content holds it: see given_up() and add_bits().
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> given_up_;
  int64_t held_ = 0;  // bytes of *alone_ and given_up_ at the latest moment
  std::shared_ptr<Known> followed_;
  std::shared_ptr<plan::MovingPlans> moving_;       // of followed_, where the budget has a store
  std::shared_ptr<const plan::Schedule> schedule_;  // of the plan, where it moves anything
  const plan::Plan* plan_ = nullptr;                // of followed_ or moving_
  // What follows is changed and read by the block's thread, and where it is over, by others.
  const bool may_pass_;
  int64_t model_ = 0;
  std::shared_ptr<const plan::Script> script_;  // null: everything is written down
  int32_t operators_ = 0;                       // that came until now, with a script
  int32_t saves_ = 0;                           // tensors that were saved until now
  int32_t inner_ = 0;                           // operators that a factory has still to call
  bool has_left_ = false;                       // the script: nothing is known of its beginning
  int64_t bytes_;            // of the budget, see limit(); 0 where a share is not known yet
  int64_t before_ = 0;       // counted bytes that lived before
  int64_t made_before_ = 0;  // in the block, and lived when it began anew; see restart()
  int64_t missing_ = 0;      // of gradients that are not there yet
  int64_t least_ = 0, peak_ = 0;
  std::vector<int64_t> curve_;
  int64_t before_proof_ = 0;  // the most bytes since the latest look, where a proof came after
  int64_t highest_ = 0;       // bytes since the latest moment
  int64_t live_ = 0;          // bytes at that moment
  int64_t most_added_ = 0;    // the most bytes that an operator has added to them while it ran
  bool saw_backward_ = false, finished_ = false;
  std::optional<Deviation> deviation_;
  std::atomic<bool> is_exact_{true};  // else it is not worth being known
};

}  // namespace memsave_ext::remat
