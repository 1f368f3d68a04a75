// What a step did and what is to be done in the next one, as numbers: a planner takes a trace, and
// returns decisions.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace memsave_ext::remat {
struct Operator;
}

namespace memsave_ext::plan {

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
  const remat::Operator* op =
      nullptr;          // that made it; null where none was seen, or nobody saved it
  int32_t module = -1;  // number of the module that made it; -1 for none
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
  bool was_repeated = false;            // `temporary` was measured when it was recomputed
  const remat::Operator* op = nullptr;  // null in tests
  int32_t moment = 0;                   // of its end
  int32_t module = -1;                  // number of the module that called it; -1 for none
};

// A moment is the end of a recorded operator in forward, or where a saved tensor is opened or
// closed in backward. Bytes are those that count for the budget, less what only the block holds.
struct TraceMoment {
  int64_t now = 0;   // at the moment
  int64_t peak = 0;  // the most since the moment before
};

// What an autograd.Function has made in its forward and keeps, as on its ctx, without saving it.
struct TraceOnContext {
  int64_t bytes = 0;   // 0: it was saved after all
  int32_t from = 0;    // the moment before which its forward ended
  int32_t until = -1;  // the moment before which its memory was gone; -1: it outlived the step
};

// An operator of the forward. Those that cannot be repeated have no call.
struct TraceOperator {
  uint64_t key = 0;   // a hash of its name and of its arguments' types and sizes
  int32_t call = -1;  // its position among the calls; -1: it has none
  int32_t saves = 0;  // how many tensors autograd had saved when it began
  int32_t inner = 0;  // of a factory: how many operators it called that are not among these
};

// What one step of a block did, as numbers: the planner's input, which outlives the block.
struct Trace {
  std::vector<TraceContent> contents;    // in the order of their making
  std::vector<TraceCall> calls;          // in the order of the forward
  std::vector<TraceMoment> moments;      // forward, then backward
  int32_t forward = 0;                   // how many of the moments are in forward
  std::vector<TraceOperator> operators;  // in the order of their beginning
  // Of each tensor that autograd saved, in order: its content; -1: none, it is kept as it is.
  std::vector<int32_t> saves;
  // Which of these backward opened first, and which it let go last.
  int32_t first_opened = -1, last_closed = -1;
  std::vector<TraceOnContext> on_context;
  // What was allocated in the step and lived at its end, such as gradients: bytes, by the position
  // of the moment that came after the allocation. In the order of these.
  std::vector<std::pair<int32_t, int64_t>> left;
};

enum class Decision : uint8_t {
  kKeep,
  kDrop,       // recomputed when it is needed first, and held until it is needed no more
  kDropTwice,  // as kDrop, but where it lies on the way to another content it is not held: it is
               // recomputed once more when it is needed itself
  kMove,       // as kDrop, but brought back from a store in place of being recomputed
  kMoveTwice,  // as kDropTwice
};

constexpr int32_t kDecisions = 5;

inline bool is_moved(Decision decision) { return decision >= Decision::kMove; }

struct Plan {
  int64_t peak = 0;                 // bytes
  double seconds = 0;               // that recomputing takes
  std::vector<Decision> decisions;  // by content; kKeep for those that are not saved
};

}  // namespace memsave_ext::plan
