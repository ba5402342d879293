// Random shapes through every method: keep sets, attend sets and outputs against the reference, chunks against one shot.
#include "catch.hpp"

#include "methods/support/compared/compared_conversation.hpp"
#include "methods/support/laws.hpp"

namespace methods_test {

namespace {

/// A budget and parameters that make sense together, small enough that most prompts exceed them.
settings random_settings(rng& random, const std::string& method) {
  const traits& made_of = traits_of(method);
  const bool token_budget = made_of.pays_for_estimates();
  settings chosen{method, token_budget ? random.between(16, 60) : random.between(2, 40)};
  const index_t window = random.chance(0.1) ? chosen.budget : random.between(1, std::min<index_t>(chosen.budget, 12));
  chosen.values = {{"window", window},
                   {"pool", random.pick({1, 3, 5, 7, 63})},
                   {"pool_kind", random.between(0, 1)},
                   {"beta", random.pick({1, 2, 20})},
                   {"floor", random.pick({0.0, 0.2, 0.5, 1.0})},
                   {"recent", random.chance(0.6) ? -1 : random.between(0, chosen.budget)},
                   {"sinks", random.between(0, std::min<index_t>(chosen.budget - 1, 6))},
                   {"block", random.pick({1, 3, 8, 16})},
                   {"newest", random.pick({0, 1, 1, 5})},
                   {"read_tokens", random.between(1, 30)}};
  if (method == "sentencekv") chosen.values["recent"] = random.between(0, 8);
  if (method == "fastkvzip") chosen.values["recent"] = random.between(0, std::min<index_t>(chosen.budget, 8));
  if (method == "exact_topk" || token_budget) chosen.values.erase("read_tokens");
  if (made_of.estimate && !token_budget) chosen.values["read_tokens"] = random.between(16, 60);
  if (made_of.plans || made_of.estimate) {
    chosen.values["max_new"] = random.pick({0, 1, 10, 40, 100});
    chosen.values["page"] = random.pick({0, 0, 1, 2, 5, 16});
    if (!made_of.rounds) chosen.values["channels"] = random.pick({0, 0, 1, 20, 64});  // of packed rows it is a share
    chosen.values["unit"] = random.between(0, 1);
    if (random.chance(0.4)) chosen.values["split"] = random.pick({0.0, 0.3, 0.5, 1.0});
    // H2O's `recent` and SparQ's have one name: it must suit both. And the window needs room beside `max_new`.
    const index_t attended = chosen.count("read_tokens", chosen.budget) / 2, room = chosen.count("max_new", 0);
    chosen.values["recent"] = random.chance(0.6)
                                  ? -1
                                  : random.between(0, made_of.scorer == traits::first::accumulated && made_of.plans
                                                          ? 0
                                                          : std::min(chosen.budget, attended));
    chosen.values["window"] = std::min({window, room > 0 ? room : 12, index_t(12)});
  }
  if (made_of.whole_blocks) {
    const index_t block = random.pick({1, 2, 4, 8, 16}), least = 2 * block;  // of a tail of 32
    chosen.values["block"] = block;
    chosen.values["read_tokens"] = std::max(least, chosen.count("read_tokens", 0));
    chosen.budget = std::max(least, chosen.budget);
  }
  for (const number& one : numbers_of(method)) {
    if (one.name == "observed") chosen.values["observed"] = std::min(window, index_t(12));
    if (one.name != "every") continue;
    chosen.values["first"] = random.pick({0, 1, 4, 16});  // the schedule's; weighted_by has a `first` of its own
    chosen.values["every"] = random.pick({1, 2, 5, 16});
  }
  if (random.chance(0.2)) chosen.rule.soft_cap = 8;
  if (random.chance(0.2)) chosen.rule.sliding_window = random.between(1, 60);
  if (random.chance(0.1)) chosen.rule.scale = 0.05f;
  return chosen;
}

index_t random_prompt(rng& random, index_t budget) {
  return random.pick({index_t(1), std::max(1, budget - 1), budget, budget + 1, random.between(1, 12),
                      random.between(1, 90), random.between(1, 90), random.between(60, 140)});
}

std::vector<index_t> random_chunks(rng& random, index_t prompt) {
  std::vector<index_t> chunks;
  for (index_t done = 0; done < prompt; done += chunks.back()) chunks.push_back(random.between(1, prompt - done));
  return chunks;
}

std::vector<index_t> random_steps(rng& random, const settings& chosen, index_t most) {
  std::vector<index_t> steps;
  const traits& made_of = traits_of(chosen.method);
  index_t least_budget = std::min(chosen.budget, chosen.count("read_tokens", chosen.budget));
  if (made_of.plans || made_of.estimate) least_budget = 8;
  for (index_t i = random.between(0, most); i > 0; --i) {
    steps.push_back(random.chance(0.7) ? 1 : random.between(1, std::min<index_t>(8, least_budget)));
  }
  return steps;
}

void run_random_conversations(const std::string& method, std::uint64_t seed, index_t shapes, index_t most_turns,
                              index_t most_steps) {
  rng random(seed);
  const auto one = std::make_shared<tessera::cpu::executor>(1), three = std::make_shared<tessera::cpu::executor>(3);
  tally counts;
  for (index_t i = 0; i < support::scaled(shapes); ++i) {
    settings chosen = random_settings(random, method);
    const index_t kv_heads = random.between(1, 3), group = random.pick({1, 1, 2, 2, 3, 4, 8});
    const bool layered = traits_of(method).budget == traits::share::pyramid;
    const tessera::model_shape shape{layered ? random.between(1, 5) : random.between(1, 2), kv_heads * group, kv_heads};
    const auto sinks = support::normals(random, std::size_t(shape.q_heads));
    if (random.chance(0.2)) chosen.rule.sink_logits = sinks.data();
    std::vector<turn> turns;
    for (index_t t = random.between(1, most_turns); t > 0; --t) {
      turns.push_back({random_prompt(random, chosen.budget), random_steps(random, chosen, most_steps)});
    }
    // Means of the same scores in another order differ in the last bit, so averages are only run without equal keys.
    // Two different keys at least: where all are equal, heads tie in exact arithmetic and in no other.
    // Of rows that are stored rounded, equal ones may differ in the last bit, too.
    const bool repeated = random.chance(0.4) && chosen.count("pool_kind", 0) == 0 && !traits_of(method).rounds;
    const model_data data(random, shape, token_count(turns), repeated ? random.between(2, 6) : 0);
    std::string values;
    for (const auto& [name, value] : chosen.values) values += name + "=" + std::to_string(value) + " ";
    CAPTURE(method, i, chosen.budget, values, chosen.rule.sliding_window, chosen.rule.soft_cap, shape.layers, kv_heads,
            group, turns.size(), turns[0].prompt);
    const conversation_setup setup{chosen, data, random.chance(0.1) ? three : one};
    for (turn& now : turns) now.chunks = random_chunks(random, now.prompt);
    const std::string wrong = wrong_of(setup, turns, counts);
    REQUIRE(wrong == "");
  }
  INFO(method << ": " << counts.compared << " choices compared, " << counts.ambiguous << " open to rounding");
  const bool few = support::scaled(100) < 100;  // then one conversation, which may have a dozen, weighs more
  CHECK(counts.ambiguous < 0.05 * counts.compared + (few ? 20 : 5));
}

/// The same seed for a method whatever others there are.
std::uint64_t seed_of(const std::string& method) {
  std::uint64_t seed = 1469598103934665603u;
  for (const char letter : method) seed = (seed ^ std::uint64_t(static_cast<unsigned char>(letter))) * 1099511628211u;
  return seed;
}

}  // namespace

void follow_reference(const std::string& method) {
  run_random_conversations(method, seed_of(method), 800, 2, 3);
  run_random_conversations(method, seed_of(method) + 1, 200, 4, 3);
}

TEST_CASE("any first stage with any second, and any filter with any second, follow the reference") {
  for (const auto& method : mixed_methods()) {
    run_random_conversations(method, seed_of(method), 150, 3, 3);
    run_random_conversations(method, seed_of(method) + 1, 50, 4, 3);
  }
}

}  // namespace methods_test
