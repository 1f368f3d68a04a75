#include "driver.h"

#include <cstdio>

namespace emulation {

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--large") == 0) {
      options.large = true;
    } else if (strcmp(argv[i], "--part") == 0) {
      options.part = true;
    } else if (strcmp(argv[i], "--one-order") == 0) {
      options.orders = {Order::kRandom};
    } else {
      options.kernels = argv[i];
    }
  }
  return options;
}

void finish(const Options& options, const char* what) {
  if (options.kernels != nullptr) {
    FILE* to = fopen(options.kernels, "w");
    if (to == nullptr) fail("cannot write %s", options.kernels);
    for (const Launched& of : launched()) {
      fprintf(to, "%zx %u\n", reinterpret_cast<size_t>(of.kernel), of.threads);
    }
    fclose(to);
  }
  printf("%s: %zu kernels, %lld values compared\n", what, launched().size(),
         static_cast<long long>(checks));
}

}  // namespace emulation
