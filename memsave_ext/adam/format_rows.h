// The tables of rules and formats: csrc/adam/rules.h and formats.h make enums and rows of them for
// the kernels, and formats.py reads the same lines. Both say what the columns are.

// SGD's momentum is a rule of its own.
#define MEMSAVE_EXT_RULES(ROW) \
  ROW(kAdam, "adam", "exp_avg exp_avg_sq") \
  ROW(kAmsgrad, "amsgrad", "exp_avg exp_avg_sq max_exp_avg_sq") \
  ROW(kSgd, "sgd", "") \
  ROW(kMomentum, "momentum", "momentum_buffer") \
  ROW(kLion, "lion", "exp_avg")

// kPlain is rounded to nearest, kStochastic at random, so that it moves by the step on average.
// kSplit is a float: the nearest bfloat16, and its lower 16 bits. kSplit8 is the upper 24 bits of a
// float, rounded at random.
#define MEMSAVE_EXT_PARAM_FORMATS(ROW) \
  ROW(kPlain, "", kNone, false) \
  ROW(kStochastic, "stochastic", kNone, true) \
  ROW(kSplit, "split", kInt16, false) \
  ROW(kSplit8, "split8", kInt8, true)

// k8Bit and k4Bit are codes, with a float scale for each block; 4-bit codes of both moments are in
// one byte.
#define MEMSAVE_EXT_STATE_FORMATS(ROW) \
  ROW(kAsParam, "as_param", false, kNone, 8, false, true, 0, 0, 0) \
  ROW(kFloat, "float32", false, kFloat, 2, false, true, 0, 0, 0) \
  ROW(kBFloat16, "bfloat16", true, kBFloat16, 4, true, true, 0, 0, 0) \
  ROW(k8Bit, "8bit", true, kUint8, 4, false, false, 256, 8, 8) \
  ROW(k4Bit, "4bit", true, kUint8, 4, false, false, 128, 4, 4)
