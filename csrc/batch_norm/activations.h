// The activations, each with its name, its value and its derivative. Everything that knows one
// derives from the list below: kernels for CPUs and CUDA, and the double backward. The fallback's
// list is memsave_ext/batch_norm/activations.py.
//
// A formula is of scalars, vectors or tensors: operators, and what Of<T> has beside them. `slope`
// is a T, or a number beside tensors. Values are selected, not multiplied by 0: NaN stays NaN, and
// infinity is left out where it is not chosen.
#pragma once

#include <string_view>

#include "vector/types.h"

namespace memsave_ext::batch_norm {

template <typename T>
struct Of {
  static MEMSAVE_EXT_INLINE T zero() { return T{}; }

  template <typename Condition>
  static MEMSAVE_EXT_INLINE T select(Condition condition, T yes, T no) {
    return condition ? yes : no;
  }
};

struct Identity {
  static constexpr std::string_view kName = "none";

  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T forward(T z, Slope) {
    return z;
  }
  // The gradient of z from that of forward(z).
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T backward(T grad, T, Slope) {
    return grad;
  }
};

struct Relu {
  static constexpr std::string_view kName = "relu";

  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T forward(T z, Slope) {
    return Of<T>::select(z <= Of<T>::zero(), Of<T>::zero(), z);
  }
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T backward(T grad, T z, Slope) {
    return Of<T>::select(z <= Of<T>::zero(), Of<T>::zero(), grad);
  }
};

struct LeakyRelu {
  static constexpr std::string_view kName = "leaky_relu";

  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T forward(T z, Slope slope) {
    return Of<T>::select(z > Of<T>::zero(), z, z * slope);
  }
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T backward(T grad, T z, Slope slope) {
    return Of<T>::select(z > Of<T>::zero(), grad, grad * slope);
  }
};

// A place in the list, for what chooses at run time.
enum class Activation : int { kIdentity, kUnlisted = -1 };

template <typename... All>
struct List {
  static constexpr int kCount = sizeof...(All);
  template <template <typename...> class Template>
  using Into = Template<All...>;

  static Activation find(std::string_view name) {
    int place = 0, found = -1;
    ((name == All::kName ? void(found = place++) : void(++place)), ...);
    return static_cast<Activation>(found);
  }
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T forward(Activation which, T z, Slope slope) {
    T value = z;
    int place = static_cast<int>(which);
    ((place-- == 0 ? void(value = All::forward(z, slope)) : void()), ...);
    return value;
  }
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T backward(Activation which, T grad, T z, Slope slope) {
    T value = grad;
    int place = static_cast<int>(which);
    ((place-- == 0 ? void(value = All::backward(grad, z, slope)) : void()), ...);
    return value;
  }
};

using Activations = List<Identity, Relu, LeakyRelu>;

}  // namespace memsave_ext::batch_norm
