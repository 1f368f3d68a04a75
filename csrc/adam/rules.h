// What optimizers compute of gradients: a row for each rule. The arithmetic: arithmetic.h.
#pragma once

#include "../../memsave_ext/adam/format_rows.h"

namespace memsave_ext::adam {

#define MEMSAVE_EXT_FIRST(id, ...) id,

enum class Rule : int { MEMSAVE_EXT_RULES(MEMSAVE_EXT_FIRST) };  // kSgd: without momentum

constexpr int count_words(const char* text) {
  int words = *text != 0;
  for (; *text != 0; ++text) words += *text == ' ';
  return words;
}

struct RuleRow {
  const char* name;
  int moments;  // that it keeps of each element; the table names them
};

constexpr RuleRow kRuleRows[] = {
#define ROW(id, name, moments) {name, count_words(moments)},
    MEMSAVE_EXT_RULES(ROW)
#undef ROW
};

constexpr int kRules = sizeof(kRuleRows) / sizeof(RuleRow);

constexpr bool is_adam(Rule rule) { return rule == Rule::kAdam || rule == Rule::kAmsgrad; }
constexpr bool is_sgd(Rule rule) { return rule == Rule::kSgd || rule == Rule::kMomentum; }

constexpr const RuleRow& row(Rule rule) { return kRuleRows[static_cast<int>(rule)]; }

}  // namespace memsave_ext::adam
