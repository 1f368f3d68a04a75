// Saved-tensor hooks of regions without Python: an autograd engine that hands out C++ hooks.
#pragma once

namespace memsave_ext {

// Puts an engine in front of torch's that, while enabled, gives a region's saved tensors C++ hooks.
// It forwards everything else. The engine is installed by the first call with true, process-wide,
// and stays; disabled, it only forwards. Returns what was set before.
bool use_engine_hooks(bool enabled);

// Installs the engine for packers with always_in_engine(), whatever was enabled.
void install_engine();

}  // namespace memsave_ext
