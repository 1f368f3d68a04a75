// Included before all sources, into which mistakes.py puts mistakes.
#pragma once

#include <string>

namespace emulated {

// Whether this process runs the mistake of this number.
bool is_mistaken(int number);

void failed(const std::string& what);

}  // namespace emulated
