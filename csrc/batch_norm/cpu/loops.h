// What each instruction set implements: passes over one piece of a tensor, on one thread.
//
// A piece is a block of rows, small enough that sums over it in float are accurate; the sums of
// several pieces are merged in double. Pieces are the same whatever the number of threads.
#pragma once

#include <cstdint>

#include "batch_norm/kernels.h"
#include "vector/isa.h"
#include "vector/types.h"

namespace memsave_ext::batch_norm::cpu {

// The rows of the matrix of coefficients, which has a column per channel.
enum Coefficient { kMean, kInvstd, kScale, kBias, kGradMean, kDotMean, kCoefficients };

constexpr int64_t kMaxChannelsLast = 512;  // most channels of a piece, if channels last
constexpr int64_t kMaxChannelsFirst = 64;  // the same if channels first, where a pass sums
constexpr int64_t kPadding = 16;  // added to each row of coefficients: they are read by vectors

// Sizes and strides are in elements. Either each column of the rows is a channel (inner == 1), or
// each row holds `width` values of each of `channels`, `channel_stride` apart.
struct Piece {
  bool channels_last;
  bool stream;  // stores bypass the caches
  int64_t rows;
  int64_t stride;
  int64_t channels;
  int64_t channel_stride;
  int64_t width;
  double slope;
  const void* input;
  const void* residual;  // may be null
  const void* grad;
  void* output;  // in backward the gradient of the input; either gradient may be null
  void* grad_residual;
  const void* coefficients;  // of the piece's first channel
  int64_t pitch;             // from one row of coefficients to the next
  double* sums;              // two vectors over the channels of the piece, sums_pitch apart
  int64_t sums_pitch;
};

struct Passes {
  void (*moments)(const Piece&);  // sets sums: mean and m2
  void (*normalize)(const Piece&);
  // sets sums: of the gradient of z, and of its product with input - mean
  void (*gradient_sums)(const Piece&);
  void (*input_gradient)(const Piece&);
};

struct PassTable {
  Passes passes[vector::kDTypes][Activations::kCount];  // [DType][Activation]
};

MEMSAVE_EXT_DECLARE_TABLES(PassTable, kPasses)

// Returns the table of the instruction set chosen for this CPU.
const PassTable& passes();

}  // namespace memsave_ext::batch_norm::cpu
