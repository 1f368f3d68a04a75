// What optimizers compute of gradients: a row for each rule. The arithmetic: arithmetic.h.
#pragma once

namespace memsave_ext::adam {

enum class Rule : int {
  kAdam,
  kAmsgrad,
  kSgd,       // without momentum
  kMomentum,  // SGD with momentum
  kLion,
};

struct RuleRow {
  Rule rule;
  const char* name;
  int moments;  // that it keeps of each element
  bool folds;   // gradients can be folded into them: see Packed
};

constexpr RuleRow kRuleRows[] = {
    {Rule::kAdam, "adam", 2, true},  {Rule::kAmsgrad, "amsgrad", 3, true},
    {Rule::kSgd, "sgd", 0, false},   {Rule::kMomentum, "momentum", 1, false},
    {Rule::kLion, "lion", 1, false},
};

constexpr int kRules = sizeof(kRuleRows) / sizeof(RuleRow);

constexpr bool is_adam(Rule rule) { return rule == Rule::kAdam || rule == Rule::kAmsgrad; }
constexpr bool is_sgd(Rule rule) { return rule == Rule::kSgd || rule == Rule::kMomentum; }

constexpr const RuleRow& row(Rule rule) { return kRuleRows[static_cast<int>(rule)]; }

}  // namespace memsave_ext::adam
