// What one step of a block did, as numbers: the planner's input, which outlives the block.
#pragma once

#include <cstdint>
#include <vector>

namespace memsave_ext::remat {

struct Operator;

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
};

struct TraceCall {
  double seconds = 0;
  std::vector<int32_t> reads;  // contents, each once
  std::vector<int32_t> makes;  // contents that get memory of their own
  // Contents among `reads` that it changes in place into `makes` (same positions there, from the
  // first one on). Their memory is reused where nobody needs it any more, and copied otherwise.
  std::vector<int32_t> writes;
  const Operator* op = nullptr;  // null in tests
};

// A moment is the end of a recorded operator in forward, or where a saved tensor is opened or
// closed in backward. Bytes are those that count for the budget, less what only the block holds.
struct TraceMoment {
  int64_t now = 0;   // at the moment
  int64_t peak = 0;  // the most since the moment before
};

struct Trace {
  std::vector<TraceContent> contents;  // in the order of their making
  std::vector<TraceCall> calls;        // in the order of the forward
  std::vector<TraceMoment> moments;    // forward, then backward
  int32_t forward = 0;                 // how many of the moments are in forward
};

}  // namespace memsave_ext::remat
