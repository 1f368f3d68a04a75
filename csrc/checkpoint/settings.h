// The settings of the process and thread that decide how an operator computes: default dtype,
// precisions, deterministic and backend flags. They are those of the forward in a recompute.
#pragma once

#include <ATen/Context.h>

#include <array>
#include <cstdint>

namespace memsave_ext {

class Settings {
 public:
  // `products`: where the precisions of products are taken from, for an operator that makes none.
  // To ask torch for them takes most of the time.
  static Settings capture(const Settings* products = nullptr);
  bool operator==(const Settings& other) const;

 private:
  friend class SettingsGuard;
  // Sets what is different in `now`, which are the present ones.
  void restore(const Settings& now) const;
  void restore_float32(const Settings& now) const;

  c10::ScalarType default_dtype_;
  uint32_t flags_;  // a bit for each of kFlags in settings.cpp
  std::array<at::CuBLASReductionOption, 2> cublas_reductions_;  // of float16 and bfloat16
  at::LinalgBackend linalg_;
  std::array<at::Float32Precision, 9> float32_;  // one for each of kFloat32 in settings.cpp
};

class SettingsGuard {
 public:
  explicit SettingsGuard(const Settings& settings);
  ~SettingsGuard();
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

 private:
  const Settings settings_, outer_;
  const bool needed_;
};

}  // namespace memsave_ext
