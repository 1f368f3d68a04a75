// Plans a step, from what an earlier one did: which saved contents are kept, and which are dropped
// and recomputed.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace memsave_ext::remat {

struct Operator;

// The host's cost of running one operator again, besides the operator's own time.
constexpr double kSecondsPerCall = 4e-6;

// Positions in the other vectors of a Trace; -1 stands for none.
struct TraceContent {
  int64_t bytes = 0;
  int32_t call = -1;   // that makes it; -1: it cannot be recomputed
  bool saved = false;  // by autograd: it is kept or dropped. Others only lie on the way
  // The moment in forward from which only the block holds it, if it does; -1: its memory lives on
  // without the block, so that keeping it costs nothing (a parameter, an input).
  int32_t let_go = -1;
  int32_t opened = -1;  // the first moment in backward at which a node needs it; -1: never
  int32_t closed = -1;  // the moment at which the last node that needs it is done; -1: never
  // It has a call, but when it was saved something was gone that would be needed to repeat it.
  bool must_be_kept = false;
  int32_t decided = -1;  // the moment at which it was saved first; -1: it was not
  // Without a call: the moment in forward from which its memory was gone, as FSDP gives back that
  // of parameters; -1: it stayed.
  int32_t emptied = -1;
  const Operator* op = nullptr;  // that made it; null where none was seen, or nobody saved it
  int32_t module = -1;           // number of the module that made it; -1 for none
};

struct TraceCall {
  double seconds = 0;
  c10::SmallVector<int32_t, 4> reads;  // contents, each once
  c10::SmallVector<int32_t, 2> makes;  // contents that get memory of their own
  // Contents among `reads` that it changes in place into `makes` (same positions there, from the
  // first one on). Their memory is reused where nobody needs it any more, and copied otherwise.
  c10::SmallVector<int32_t, 2> writes;
  // Bytes that it has for itself while it runs, besides what it reads and makes.
  int64_t temporary = 0;
  bool was_repeated = false;     // `temporary` was measured when it was recomputed
  const Operator* op = nullptr;  // null in tests
  int32_t moment = 0;            // of its end
};

// A moment is the end of a recorded operator in forward, or where a saved tensor is opened or
// closed in backward. Bytes are those that count for the budget, less what only the block holds.
struct TraceMoment {
  int64_t now = 0;   // at the moment
  int64_t peak = 0;  // the most since the moment before
};

// What one step of a block did, as numbers: the planner's input, which outlives the block.
struct Trace {
  std::vector<TraceContent> contents;  // in the order of their making
  std::vector<TraceCall> calls;        // in the order of the forward
  std::vector<TraceMoment> moments;    // forward, then backward
  int32_t forward = 0;                 // how many of the moments are in forward
  // What was allocated in the step and lived at its end, such as gradients: bytes, by the position
  // of the moment that came after the allocation. In the order of these.
  std::vector<std::pair<int32_t, int64_t>> left;
};

// Marks what must be kept whatever else is dropped: what shares its memory with something else that
// is saved, as where chunks of a tensor are written one by one (dropping one of these would free
// nothing), and what could only be computed from memory that was emptied or written before.
void mark_what_must_be_kept(Trace& trace);

enum class Decision : uint8_t {
  kKeep,
  kDrop,       // recomputed when it is needed first, and held until it is needed no more
  kDropTwice,  // as kDrop, but where it lies on the way to another content it is not held: it is
               // recomputed once more when it is needed itself
  kMove,       // as kDrop, but brought back from a store in place of being recomputed
  kMoveTwice,  // as kDropTwice
};

inline bool is_moved(Decision decision) { return decision >= Decision::kMove; }

struct Plan {
  int64_t peak = 0;                 // bytes
  double seconds = 0;               // that recomputing takes
  std::vector<Decision> decisions;  // by content; kKeep for those that are not saved
};

// Returns what a step with these decisions needs.
Plan simulate(const Trace& trace, std::vector<Decision> decisions);

// Returns plans from the fastest, which keeps everything, to the one with the lowest peak found:
// seconds rise, peaks fall. None runs an operator again more than twice, but for the last one where
// that lowers the peak further; it alone may take less time than the one before. The same trace
// gives the same plans. All decisions are tried where at most `most_enumerated` contents can be
// dropped.
std::vector<Plan> plans_of(const Trace& trace, int most_enumerated = 14);

// Returns the one of a trace's plans with the lowest sum of time and memory, as shares of the plain
// step's. A percent of the time is worth four of the memory.
const Plan& best_value(const Trace& trace, const std::vector<Plan>& plans);

}  // namespace memsave_ext::remat
