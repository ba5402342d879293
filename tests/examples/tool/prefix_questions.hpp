// Questions about one document, asked with and without its beginning stored.
#pragma once

#include <string>
#include <vector>

#include "evaluation_bench.hpp"

namespace tool_tests {

using plans = std::vector<std::vector<tool::planned_turn>>;

/// Two turns each. The document ends in the middle of a chunk.
inline plans questions_about(bench& on, int lines, const std::vector<std::string>& answers) {
  std::string document;
  for (int i = 0; i < lines; ++i) document += "The rays which differ in colour differ also in degrees.\n";
  plans all;
  for (const std::string& answer : answers) {
    const std::string own = "Question: which " + std::to_string(all.size()) + "?\nAnswer:";
    all.push_back(on.plan({"many", {{document + own, answer}, {"\nQuestion: why?\nAnswer:", "y"}}}));
  }
  return all;
}

inline std::vector<tool::question_group> groups_of(bench& on, const plans& all, std::size_t document,
                                                   std::int32_t chunk) {
  std::vector<tool::groupable> questions;
  for (const auto& turns : all) questions.push_back({turns, document});
  return tool::group_questions(questions, on.tokenizer, chunk);
}

/// Compares everything but what was not read again.
inline void check_same(const std::vector<tool::variant>& variants, const std::vector<tool::cell>& a,
                       const std::vector<tool::cell>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO(variants[a[i].variant].method->name << " " << variants[a[i].variant].budget.value_or(0) << ", turn "
                                             << a[i].turn);
    CHECK(a[i].variant == b[i].variant);
    CHECK(a[i].turn == b[i].turn);
    CHECK(a[i].answers == b[i].answers);
    CHECK(a[i].scores == b[i].scores);
    CHECK(a[i].bytes_held == b[i].bytes_held);
    CHECK(a[i].bytes_full == b[i].bytes_full);
    CHECK(a[i].bytes_read == b[i].bytes_read);
    CHECK(a[i].steps == b[i].steps);
    CHECK(a[i].pairs.attended == b[i].pairs.attended);
    CHECK(a[i].pairs.visible == b[i].pairs.visible);
    CHECK(a[i].prompt_tokens == b[i].prompt_tokens);
  }
}

inline tool::evaluation asked(bench& on, const std::vector<tool::variant>& variants, const plans& all,
                              const std::vector<tool::question_group>& groups, bool stores) {
  auto evaluation = on.evaluation(variants);
  evaluation.store_prefixes(stores);
  std::size_t next = 0;
  for (const tool::question_group& group : groups) {
    evaluation.begin_group(group);
    for (std::size_t i = 0; i < group.count; ++i) evaluation.run("many", all[next++]);
  }
  return evaluation;
}

}  // namespace tool_tests
