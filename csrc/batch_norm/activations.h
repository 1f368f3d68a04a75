// The activations, each with its name, value and derivative. The CPU and CUDA kernels and the
// double backward all use the list at the end of this file. The fallback's list is
// memsave_ext/batch_norm/activations.py.
//
// A formula works on scalars, vectors and tensors: it uses only operators and the functions of
// Values<T>. `slope` is a T, or a number where T is a tensor. Values are selected instead of
// multiplied by 0, so that a NaN stays NaN and an infinity that is not selected has no effect.
#pragma once

#include <string_view>

#include "vector/types.h"

namespace memsave_ext::batch_norm {

template <typename T>
struct Values {
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
  // Returns the gradient of z, given that of forward(z).
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T backward(T grad, T, Slope) {
    return grad;
  }
};

struct Relu {
  static constexpr std::string_view kName = "relu";

  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T forward(T z, Slope) {
    return Values<T>::select(z <= Values<T>::zero(), Values<T>::zero(), z);
  }
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T backward(T grad, T z, Slope) {
    return Values<T>::select(z <= Values<T>::zero(), Values<T>::zero(), grad);
  }
};

struct LeakyRelu {
  static constexpr std::string_view kName = "leaky_relu";

  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T forward(T z, Slope slope) {
    return Values<T>::select(z > Values<T>::zero(), z, z * slope);
  }
  template <typename T, typename Slope>
  static MEMSAVE_EXT_INLINE T backward(T grad, T z, Slope slope) {
    return Values<T>::select(z > Values<T>::zero(), grad, grad * slope);
  }
};

// A position in Activations, for code that chooses the activation at run time.
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
