// The steps that this process has seen, by device, with their plans.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "locks.h"
#include "plan/move.h"
#include "plan/plan.h"
#include "plan/script.h"
#include "remat/content.h"
#include "remat/count.h"
#include "store/store.h"

namespace memsave_ext::remat {

// The time between two events on the current stream of a device. Nothing waits for them: the time
// is known once the device has passed both.
class DeviceTime {
 public:
  // Of a CUDA device. Null while a graph is captured, and where tensors are fake.
  static std::unique_ptr<DeviceTime> start(c10::Device device);
  void stop();
  // Includes the time for which the device waited for the host between the two.
  std::optional<double> seconds() const;

 private:
  explicit DeviceTime(c10::Stream stream);

  const c10::Stream stream_;
  c10::Event begin_, end_;
};

// How long an operator took on its device. The key is that of Step::began().
struct TimeOfKey {
  uint64_t key;
  std::shared_ptr<const DeviceTime> time;
};

// A step that has ended. It is found again by the operators and shapes before each decision.
struct Known {
  std::vector<uint64_t> keys;     // by decision: a hash of all operators until then
  plan::Trace trace;              // with infinite times of calls, until read_times()
  std::vector<uint64_t> calls;    // keys, by position in trace.calls
  std::vector<TimeOfKey> times;   // on devices; empty once they were read
  int64_t before = 0;             // counted bytes that lived before the step
  int64_t missing = 0;            // bytes of gradients that were not there before it
  int others = 0;                 // steps that were running when it began, see KnownSteps::begin()
  std::vector<plan::Plan> plans;  // empty until they are asked for, and then never changed
  bool plans_are_old = false;     // made for the memory of an earlier step of the same program
  int seen = 1;                   // how many steps like it have ended
  bool told = false;              // whether a user was told that the budget is too small
  std::vector<int64_t> models;    // whose steps it was, by number; see Step::of_model()
  std::vector<Verdict> verdicts;  // by content: what was decided; of those that were not, any
  // A plan by which whole steps have gone, with the peak that was planned, and within the budget
  // where the plan is: its decisions, and the models that these were of, by number. A step of
  // another model may be another one after its last decision, as with another loss.
  struct Proven {
    std::vector<plan::Decision> decisions;
    std::vector<int64_t> models;
  };
  std::optional<Proven> proven;
  std::shared_ptr<const plan::Script> script;  // for that plan, once it is asked for
  // How many more steps are to be written down before one goes by the script. It doubles whenever
  // one that did went another way: where two programs take turns, both become known meanwhile.
  int scripts_after = 0, latest_wait = 0;
  uint64_t ended = 0;  // how many steps had ended then, the latest time
  // It ran on fake tensors, ahead of the first real one, which it gives way to once that one's
  // times are known: it may begin with the same operators and go on with others, and its times are
  // estimates.
  bool is_ahead = false;

  // Its plans that move contents, too, for what a store's speed is now.
  std::shared_ptr<plan::MovingPlans> moving(const std::shared_ptr<store::Store>& store,
                                            int64_t most_moved);
  size_t moving_plans() const;  // how many of these it has now

  // Completes the trace's times with those measured on devices, as soon as the devices have come so
  // far. Returns whether all are known.
  bool read_times();
  // Notes that a whole step of a model has gone by a plan with these decisions.
  void prove(const std::vector<plan::Decision>& decisions, int64_t model);
  bool is_proven(const std::vector<plan::Decision>& decisions, int64_t model) const;
  // Whether the other one, of the same decisions, has the same operators after the last of them,
  // and a backward that reads the same and leaves as many gradients.
  bool ends_like(const Known& other) const;
  // Whether backward leaves about as much, which it does not where an optimizer steps in it.
  bool leaves_like(const Known& other) const;
  bool is_of(int64_t model) const;
  void note_models(const std::vector<int64_t>& more);
  // Whether the other one has the same operators and contents, and whether as much memory, too.
  bool is_same_program(const Known& other) const;
  bool is_same_memory(const Known& other) const;
  // Whether about so many bytes lived before it.
  bool is_as_of(int64_t other) const;
  // Whether it is a step of the same operators, on as much memory from before as far as it matters.
  bool is_same(const Known& other) const;

  // See moving(). A copy of the step has none: another thread may be making them.
  struct LatestMoving {
    LatestMoving() = default;
    LatestMoving(const LatestMoving&) {}
    std::shared_ptr<plan::MovingPlans> plans;
    // Between blocks, too: a file is written for the first time at a thirtieth of the speed.
    std::shared_ptr<store::Store> file;
  } latest_moving;
};

// What the steps of a device share.
class KnownSteps {
 public:
  explicit KnownSteps(at::Device device, bool counts_all = false) : count(device, counts_all) {}

  Count count;

  // Returns how many other steps are running, up to kMostOthers. Where a model is called twice
  // before a backward, the two steps have the same operators and other memory beside them.
  int begin(Count::Peak& peak);
  // `step` may be null: it is not worth being known.
  void end(std::shared_ptr<Known> step, Count::Peak& peak);
  // Returns a step with these keys at its beginning, with its plans; null if none. Where there are
  // several, as of models that begin alike, it is one that can be planned now, of these one with as
  // many bytes of gradients `missing`, if there is one, of these one with as many `others`, of
  // these one before which about as much lived as `before`, of these one that was this model's, of
  // these one that did not run ahead, and of these the latest. It must have been seen `least_seen`
  // times, and its times must be known. `exact`: plans that were made for other memory are made
  // again.
  std::shared_ptr<Known> find(const std::vector<uint64_t>& keys, int64_t before, int64_t missing,
                              int others, int64_t model, int least_seen, bool exact);
  // How long this operator took in a step that has plans, whose times stay, and whose call of that
  // number it was; none if there is no such step. What a step calls before its first decision, by
  // which it is found, need not be timed again.
  std::optional<double> seconds_of(size_t call, uint64_t key) const;
  bool overlapped() const;  // whether another step has run while this one does
  bool any() const;         // whether a step has ended that is worth being known
  // The step that has ended last, which is known no more; null if none.
  std::shared_ptr<Known> take_latest();
  // Adds a step that ran on fake tensors, unless a step with the same operators is known, which
  // left as many gradients.
  void expect(std::shared_ptr<Known> step);
  // Whether a step is known whose operators until its last decision have this hash.
  bool knows(uint64_t last_key) const;
  // Returns what a step that follows this plan of it has to do, `decisions` of which are made; null
  // where it has to be written down whole: none of the model has gone by this plan yet, or another
  // program began with the same operators lately.
  // It begins after so many operators and saved tensors.
  std::shared_ptr<const plan::Script> script(Known& step, const plan::Plan& plan, int64_t model,
                                             size_t decisions, size_t operators,
                                             size_t saves) const;
  // A step that went by its script: it is the latest, as one that was written down would be.
  void came_again(const Known& step);
  // One that went by its script has left it, or has needed another peak than was planned.
  void left_script(Known& step) const;
  // Notes that a user is told of a step. Returns whether that is the first time.
  bool tell(Known& step) const;
  void forget();
  struct Numbers {
    size_t known, planned;
  };
  Numbers numbers() const;

 private:
  static constexpr int kMostOthers = 8;

  void settle();
  void add(std::shared_ptr<Known> step, bool overlapped);
  void add_with_gradients(const Known& step, const Count::Survivors& survivors);
  void replace_ahead(Known& step);
  bool is_ambiguous(const Known& step, size_t decisions) const;

  mutable Lock mutex_{LockOrder::kKnownSteps};
  int running_ = 0;
  bool overlapped_ = false;  // while another step ran
  uint64_t ended_ = 0;       // steps until now
  // Not added yet: what it allocated for good is known once the next step has counted it.
  std::shared_ptr<Known> latest_;
  bool next_has_begun_ = false;                // after latest_
  std::vector<std::shared_ptr<Known>> steps_;  // latest last
  std::minstd_rand chance_;                    // which of them is forgotten for another
};

// Of the meta device: those of the prediction that runs on this thread.
std::shared_ptr<KnownSteps> known_steps(at::Device device);
// Forgets the steps of all devices, for tests.
void forget_known_steps();

}  // namespace memsave_ext::remat
