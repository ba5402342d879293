// Conversations with new text in every turn, after the benchmark of LoopServe (arXiv:2507.13681, Algorithms 1 to 3).
#include <algorithm>

#include "task_spec.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

constexpr const char* kinds[] = {"passages", "fragments", "examples"};

struct named_place {
  const char* name;
  question_place place;
};
constexpr named_place places[] = {
    {"first", question_place::first}, {"middle", question_place::middle}, {"last", question_place::last}};

const nlohmann::json& entry(const nlohmann::json& all, const char* kind, const char* key) {
  return all.at("dialogues").at(kind).at(key);
}

}  // namespace

void task_book::add_dialogues() {
  for (const char* kind : kinds) {
    if (!spec_->all.at("dialogues").contains(kind)) continue;
    for (const named_place& where : places) {
      dialogues_.push_back(std::string(kind) + "_" + where.name);
      random_source trial(0);
      (void)make_dialogue(dialogues_.back(), longest_dialogue, trial);  // reads every entry it needs
    }
  }
}

bool task_book::is_dialogue(std::string_view family) const { return std::ranges::count(dialogues_, family) > 0; }

dialogue task_book::make_dialogue(std::string_view family, std::size_t turns, random_source& random) const {
  require_one_of("family", family, dialogues_);
  tessera::require(turns >= 1 && turns <= longest_dialogue, "turns", turns, "1 to " + std::to_string(longest_dialogue),
                   "ask for fewer turns");
  dialogue made;
  made.turns.resize(turns);
  for (const named_place& where : places) {
    if (family.ends_with(where.name)) made.place = where.place;
  }
  if (family.starts_with("passages")) fill_passages(random, made);
  if (family.starts_with("fragments")) fill_fragments(random, made);
  if (family.starts_with("examples")) fill_examples(random, made);
  return made;
}

// Algorithm 1, questions and answers. A turn depends on turns that are drawn from those so far, here on one or two of them. A passage
// comes once, in its own turn, and not again with every turn that depends on it.
void task_book::fill_passages(random_source& random, dialogue& made) const {
  const std::size_t turns = made.turns.size(),
                    distractors = counted(entry(spec_->all, "passages", "distractors"), "distractors");
  const auto codes = spec_->draw_codes(random, turns * (1 + distractors));
  std::vector<code> so_far;
  for (std::size_t t = 0; t < turns; ++t) {
    dialogue_turn& turn = made.turns[t];
    turn.sentences = {spec_->needle(codes[t])};
    so_far.push_back(codes[t]);
    for (std::size_t i = 0; i < distractors; ++i)
      turn.distractors.push_back(spec_->needle(codes[turns + t * distractors + i]));
    const auto wanted = random.sample(so_far, 1 + random.below(std::min<std::size_t>(2, t + 1)));
    turn.ask = wanted.size() == 1 ? spec_->ask_one(wanted[0]) : spec_->ask_several(wanted);
  }
}

// Algorithm 2, summaries. A document's fragments are spread over turns; the turn that asks for it comes with the last one, or later.
void task_book::fill_fragments(random_source& random, dialogue& made) const {
  const std::size_t turns = made.turns.size(),
                    fragments = counted(entry(spec_->all, "fragments", "fragments"), "fragments"),
                    distractors = counted(entry(spec_->all, "fragments", "distractors"), "distractors");
  const strings names = random.sample(spec_->names, turns * (1 + distractors)),
                values = spec_->draw_values(random, turns * (fragments + distractors));
  std::vector<std::vector<strings>> groups(turns);  // by turn: the sentences of each name
  std::size_t value = 0;
  for (std::size_t t = 0; t < turns; ++t) {
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < fragments; ++i) places.push_back(random.below(t + 1));
    std::sort(places.begin(), places.end());
    strings listed;
    std::size_t before = turns;
    for (const std::size_t place : places) {
      if (place != before) groups[place].emplace_back();
      before = place;
      listed.push_back(values[value++]);
      groups[place].back().push_back(spec_->needle({names[t], listed.back()}));
    }
    made.turns[t].ask = {filled(spec_->text("ask_values"), {{"name", names[t]}}),
                         joined_by(listed, spec_->text("separator"))};
  }
  for (std::size_t t = 0; t < turns; ++t) {
    made.turns[t].sentences = interleaved(random, groups[t]);
    for (std::size_t i = 0; i < distractors; ++i)
      made.turns[t].distractors.push_back(spec_->needle({names[turns + t * distractors + i], values[value++]}));
  }
}

// Algorithm 3, examples. Each turn brings as many; its question depends on those of all turns so far. Which word is the most frequent
// one changes from turn to turn, and no two are nearly as frequent.
void task_book::fill_examples(random_source& random, dialogue& made) const {
  std::vector<std::size_t> frequencies;
  for (const auto& one : entry(spec_->all, "examples", "frequencies"))
    frequencies.push_back(counted(one, "frequencies"));
  const std::size_t asked_for = frequencies.size(), others = counted(entry(spec_->all, "examples", "others"), "others");
  constexpr std::size_t gap = 2;
  std::sort(frequencies.rbegin(), frequencies.rend());
  for (std::size_t i = 0; i < asked_for; ++i) {
    tessera::require(frequencies[i] >= gap + (i + 1 < asked_for ? frequencies[i + 1] : 0), "frequencies of examples",
                     frequencies[i],
                     "numbers that are at least " + std::to_string(gap) + " apart, the least of them too",
                     "start from examples/data/tasks.json");
  }
  const auto count = spec_->all.at("counts").at(std::to_string(asked_for)).get<std::string>();
  const strings words = random.sample(spec_->words, asked_for + made.turns.size() * others);
  std::vector<std::size_t> totals(asked_for), order(asked_for);  // by word; words, the most frequent first
  for (std::size_t i = 0; i < asked_for; ++i) order[i] = i;
  std::size_t other = asked_for;
  for (dialogue_turn& turn : made.turns) {
    const auto ranked = [&](const std::vector<std::size_t>& sums) {
      std::vector<std::size_t> by_rank = order;
      std::stable_sort(by_rank.begin(), by_rank.end(), [&](std::size_t a, std::size_t b) { return sums[a] > sums[b]; });
      return by_rank;
    };
    std::vector<std::size_t> given(asked_for), sums;
    for (int tries = 20;; --tries) {  // the last time by rank, which keeps words apart
      std::vector<std::size_t> drawn = order;
      if (tries > 0) random.shuffle(drawn);
      sums = totals;
      for (std::size_t i = 0; i < asked_for; ++i) sums[drawn[i]] += given[drawn[i]] = frequencies[i];
      const auto by_rank = ranked(sums);
      bool apart = true;
      for (std::size_t i = 0; i + 1 < asked_for; ++i) apart &= sums[by_rank[i]] >= sums[by_rank[i + 1]] + gap;
      if (apart || tries == 0) break;
    }
    totals = sums;
    order = ranked(totals);
    for (std::size_t i = 0; i < asked_for; ++i)
      turn.sentences.insert(turn.sentences.end(), given[i], filled(spec_->text("signal"), {{"word", words[i]}}));
    for (std::size_t i = 0; i < others; ++i)
      turn.sentences.push_back(filled(spec_->text("signal"), {{"word", words[other++]}}));
    random.shuffle(turn.sentences);
    strings best;
    for (const std::size_t word : order) best.push_back(words[word]);
    turn.ask = {filled(spec_->text("ask_signals"), {{"count", count}}), joined_by(best, spec_->text("separator"))};
  }
}

}  // namespace tool
