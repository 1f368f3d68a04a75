// What optimizers compute of gradients: a row for each rule. The arithmetic: arithmetic.h.
#pragma once

namespace memsave_ext::adam {

enum class Rule : int {
  kAdam,
  kAmsgrad,
};

struct RuleRow {
  Rule rule;
  const char* name;
  int moments;  // that it keeps of each element
  bool folds;   // gradients can be folded into them: see Packed
};

constexpr RuleRow kRuleRows[] = {
    {Rule::kAdam, "adam", 2, true},
    {Rule::kAmsgrad, "amsgrad", 3, true},
};

constexpr int kRules = sizeof(kRuleRows) / sizeof(RuleRow);

constexpr const RuleRow& row(Rule rule) { return kRuleRows[static_cast<int>(rule)]; }

}  // namespace memsave_ext::adam
