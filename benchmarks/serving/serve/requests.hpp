// What a serving benchmark is asked: conversations of one or several turns, drawn from a mix.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>

#include "engine/config.hpp"

namespace serving {

using engine::token_t;
using tessera::index_t;
using tessera::offset_t;

struct turn {
  std::vector<token_t> prompt;  ///< without what came before it in the conversation
  index_t answer = 1;           ///< tokens
};
struct conversation {
  double arrival = 0;      ///< seconds
  double pause = 0;        ///< seconds from the end of an answer to the next turn
  int document = -1;       ///< what the first prompt begins with; -1: nothing that others begin with too
  std::size_t shared = 0;  ///< tokens of the document
  std::vector<turn> turns;

  std::size_t first_prompt() const { return turns.front().prompt.size(); }
  /// Of all prompts and answers.
  std::size_t tokens() const {
    std::size_t total = 0;
    for (const turn& entry : turns) total += entry.prompt.size() + std::size_t(entry.answer);
    return total;
  }
};

/// Ranges of counts that are drawn evenly, both ends included.
struct count_range {
  index_t lower = 0, upper = 0;
};
struct mix {
  const char* name;
  const char* about;
  count_range prompt;  ///< of the first turn, the question included; with documents: the question alone
  count_range answer;
  index_t turns = 1;
  count_range question{};  ///< prompts of later turns
  double pause = 0;
  index_t documents = 0;  ///< 0: conversations share nothing
  count_range document{};
};

/// `short` to `answers` are the simulator's. `scbench` and `scbench_long` are nearest to TANGRAM's (arXiv:2606.06302, Sec. 5.1
/// and figure 14): sessions of SCBench, which has about five questions for each context; contexts of 30,000 tokens on
/// average, and those that the paper calls long, of more than 100,000.
inline const std::vector<mix>& mixes() {
  static const std::vector<mix> all{
      {"short", "one turn", {2000, 8000}, {100, 400}},
      {"mid", "one turn", {16000, 32000}, {200, 600}},
      {"long", "one turn", {64000, 120000}, {200, 600}},
      {"answers", "one turn", {32000, 64000}, {1500, 2500}},
      {"scbench", "five turns over a context of its own", {20000, 40000}, {20, 200}, 5, {50, 150}},
      {"scbench_long", "five turns over a context of its own", {100000, 130000}, {20, 200}, 5, {50, 150}},
      {"shared", "three turns over one of four documents", {100, 300}, {100, 300}, 3, {100, 300}, 1, 4, {12000, 20000}},
  };
  return all;
}
inline const mix& find_mix(const std::string& name) {
  std::string known;
  for (const mix& entry : mixes()) {
    if (entry.name == name) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  tessera::fail("mix", name, "one of " + known, "see the file's head");
}

/// Numbers that are the same with every standard library.
class random_source {
 public:
  explicit random_source(std::uint64_t seed) : engine_(seed) {}
  index_t between(count_range range) {
    return range.lower + index_t(engine_() % std::uint64_t(range.upper - range.lower + 1));
  }
  /// In (0, 1].
  double uniform() { return (double(engine_() >> 11) + 1) / 9007199254740992.0; }
  double exponential(double rate) { return -std::log(uniform()) / rate; }
  /// Of mean 0 and deviation 1.
  double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
  std::vector<token_t> tokens(index_t count, token_t vocabulary) {
    std::vector<token_t> made(static_cast<std::size_t>(count));
    for (token_t& token : made) token = token_t(engine_() % std::uint64_t(vocabulary));
    return made;
  }

 private:
  std::mt19937_64 engine_;
};

/// Conversations of a mix, the same for the same seed. `rate`: conversations that arrive in a second, by a Poisson process;
/// 0: all are there at the beginning.
inline std::vector<conversation> draw(const mix& workload, int count, double rate, token_t vocabulary,
                                      std::uint64_t seed) {
  random_source random(seed);
  std::vector<std::vector<token_t>> documents;
  for (index_t i = 0; i < workload.documents; ++i)
    documents.push_back(random.tokens(random.between(workload.document), vocabulary));
  std::vector<conversation> all;
  double now = 0;
  for (int i = 0; i < count; ++i) {
    conversation made;
    if (rate > 0) now += random.exponential(rate);
    made.arrival = now;
    made.pause = workload.pause;
    for (index_t t = 0; t < workload.turns; ++t)
      made.turns.push_back({random.tokens(random.between(t == 0 ? workload.prompt : workload.question), vocabulary),
                            random.between(workload.answer)});
    if (!documents.empty()) {
      made.document = int(random.between({0, workload.documents - 1}));
      const auto& document = documents[std::size_t(made.document)];
      made.shared = document.size();
      auto& first = made.turns.front().prompt;
      first.insert(first.begin(), document.begin(), document.end());
    }
    all.push_back(std::move(made));
  }
  return all;
}

}  // namespace serving
