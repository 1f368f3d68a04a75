// In which order threads take turns, and how the program ends where one breaks a rule.
#pragma once

#include <cstdint>

namespace emulation {

// In which blocks, warps and lanes take  Forward: each goes as far as it can before the next.
enum class Order { kForward, kReverse, kRandom };
const char* name(Order order);
void use(Order order, uint64_t seed = 0);

// Prints a line and ends the program.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The i-th of `count`, or the i-th last, or any.
unsigned pick(unsigned i, unsigned count);
// 0 to before `count`, in that order.
void permute(unsigned* places, unsigned count);

}  // namespace emulation
