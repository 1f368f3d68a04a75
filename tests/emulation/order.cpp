#include "order.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <utility>

namespace emulation {
namespace {

Order order = Order::kForward;
uint64_t random_state = 0;

// Knuth's linear congruential generator.
unsigned below(unsigned count) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>((random_state >> 33) % count);
}

}  // namespace

const char* name(Order order) {
  return order == Order::kForward ? "forward" : order == Order::kReverse ? "reverse" : "random";
}

void use(Order chosen, uint64_t seed) {
  order = chosen;
  random_state = seed;
}

unsigned pick(unsigned i, unsigned count) {
  return order == Order::kForward ? i : order == Order::kReverse ? count - 1 - i : below(count);
}

void permute(unsigned* places, unsigned count) {
  for (unsigned i = 0; i < count; ++i) places[i] = order == Order::kReverse ? count - 1 - i : i;
  if (order != Order::kRandom) return;
  for (unsigned i = count; i > 1; --i) std::swap(places[i - 1], places[below(i)]);
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "emulation (%s): ", name(order));
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  fflush(nullptr);
  _exit(1);
}

}  // namespace emulation
