// A parameter with its gradient and state, twice: for the CPU's kernels and for the emulated ones.
#pragma once

#include "adam/kernels.h"
#include "driver.h"

namespace emulation {

using memsave_ext::adam::Element;
using memsave_ext::adam::in_blocks;
using memsave_ext::adam::is_joint;
using memsave_ext::adam::Item;
using memsave_ext::adam::ParamFormat;
using memsave_ext::adam::row;
using memsave_ext::adam::Rule;
using memsave_ext::adam::StateFormat;
using memsave_ext::vector::DType;

struct Format {
  DType param;
  ParamFormat param_format;
  StateFormat states;
  Rule rule;
};

enum Operand { kParam, kLowPart, kGrad, kExpAvg, kExpAvgSq, kMax, kScale, kScaleSq, kOperands };
constexpr const char* kNames[] = {"param",         "param_low_part",  "grad",
                                  "exp_avg",       "exp_avg_sq",      "max_exp_avg_sq",
                                  "exp_avg_scale", "exp_avg_sq_scale"};

inline bool in_blocks(const Format& f) { return in_blocks(f.states); }

inline Stored stored(DType type) {
  return type == DType::kDouble  ? Stored::kDouble
         : type == DType::kFloat ? Stored::kFloat
         : type == DType::kHalf  ? Stored::kHalf
                                 : Stored::kBFloat16;
}

// Of an operand that the format has.
inline Stored stored(const Format& f, Operand operand) {
  if (operand == kScale || operand == kScaleSq) return Stored::kFloat;
  if (operand == kLowPart) {
    const Element low_part = row(f.param_format).low_part;
    return low_part == Element::kInt8    ? Stored::kBits8
           : low_part == Element::kInt16 ? Stored::kBits16
                                         : Stored::kBFloat16;
  }
  if (operand == kParam || operand == kGrad || f.states == StateFormat::kAsParam) {
    return stored(f.param);
  }
  return in_blocks(f)                         ? Stored::kBits8
         : f.states == StateFormat::kBFloat16 ? Stored::kBFloat16
                                              : Stored::kFloat;
}

inline bool has(const Format& f, Operand operand) {
  switch (operand) {
    case kLowPart:
      return row(f.param_format).low_part != Element::kNone;
    case kExpAvg:
      return row(f.rule).moments > 0;
    case kExpAvgSq:
      return row(f.rule).moments > 1 && !is_joint(f.states);
    case kMax:
      return row(f.rule).moments > 2;
    case kScale:
      return in_blocks(f);
    case kScaleSq:
      return row(f.rule).moments > 1 && in_blocks(f);
    default:
      return true;
  }
}

class Tensor {
 public:
  // Offset: of the operand `shifted`, or of each where that is kOperands.
  Tensor(const Format& format, size_t numel, int offset, Operand shifted, Generator& generator,
         bool finite = true)
      : format_(format), numel_(numel) {
    const auto blocks = in_blocks(format) ? memsave_ext::adam::blocks_of(format.states, numel) : 0;
    for (int i = 0; i < kOperands; ++i) {
      const auto operand = static_cast<Operand>(i);
      if (!has(format, operand)) continue;
      const bool scale = operand == kScale || operand == kScaleSq;
      const size_t shift = shifted == kOperands || shifted == operand ? offset : 0;
      cpu_[i] = Memory(stored(format, operand), scale ? blocks : numel, shift);
      fill(cpu_[i], operand, generator, finite);
      device_[i] = cpu_[i].copy();
    }
  }

  Item item(bool on_device) const {
    const Memory* of = on_device ? device_ : cpu_;
    Item item = {};
    item.param = of[kParam].at();
    item.param_low_part = of[kLowPart].at();
    item.grad = of[kGrad].at();
    item.exp_avg = of[kExpAvg].at();
    item.exp_avg_sq = of[kExpAvgSq].at();
    item.max_exp_avg_sq = of[kMax].at();
    item.exp_avg_scale = reinterpret_cast<float*>(of[kScale].at());
    item.exp_avg_sq_scale = reinterpret_cast<float*>(of[kScaleSq].at());
    item.numel = static_cast<int64_t>(numel_);
    item.param_type = format_.param;
    item.param_format = format_.param_format;
    item.state_format = format_.states;
    return item;
  }

  void compare(const char* what) const {
    for (int i = 0; i < kOperands; ++i) {
      if (cpu_[i].at() == nullptr) continue;
      cpu_[i].written_elsewhere();
      const int64_t at = first_difference(cpu_[i], device_[i]);
      checks += static_cast<int64_t>(cpu_[i].count());
      if (at < 0) continue;
      fail(
          "adam, %s: type %d, format %d, states %d, rule %d: element %lld of %zu of %s is "
          "%.17g, "
          "on the CPU %.17g",
          what, static_cast<int>(format_.param), static_cast<int>(format_.param_format),
          static_cast<int>(format_.states), static_cast<int>(format_.rule),
          static_cast<long long>(at), cpu_[i].count(), kNames[i], device_[i].get(at),
          cpu_[i].get(at));
    }
  }

 private:
  void fill(Memory& memory, Operand operand, Generator& generator, bool finite) const {
    for (size_t i = 0; i < memory.count(); ++i) {
      memory.set(i, value(memory.type(), operand, generator, finite));
    }
  }

  double value(Stored type, Operand operand, Generator& generator, bool finite) const {
    if (type == Stored::kBits8) return below(generator, 256);
    if (type == Stored::kBits16) return below(generator, 65536);
    const double x = normal(generator);
    switch (operand) {
      case kParam:
        return x;
      case kLowPart:
        return x / 1024;
      case kScale:
      case kScaleSq:
        return below(generator, 8) == 0 ? 0 : std::fabs(x) / 16;
      case kGrad:
        break;
      default:
        return operand == kExpAvg ? x / 16 : x * x / 256;
    }
    static constexpr double kRare[] = {0, -0.0, 1e-7, 1e-30, 3e4, INFINITY, -INFINITY, NAN};
    const int rare = below(generator, 64);
    return rare < (finite ? 5 : 8) ? kRare[rare] : x / 4;
  }

  Format format_;
  size_t numel_;
  Memory cpu_[kOperands], device_[kOperands];
};

}  // namespace emulation
