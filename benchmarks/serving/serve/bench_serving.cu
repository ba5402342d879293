// Serving on a GPU: the example engine at Llama-3.1-8B's shape with random bf16 weights, and a small scheduler over the cache
// of each method. Requests per second and the time to the first token, with the same memory for every method.
//
//   bench_serving [--methods full,snapkv,tangram,rocketkv_mt,mosaickv] [--mix short] [--rate saturated] [--requests 60]
//                 [--memory 24] [--budget 0.25] [--chunk 2048] [--sequences 64] [--answer-share 0] [--prefixes 1]
//                 [--limit 0] [--layers 32] [--seed 1] [--out FILE]
//
// --mix        short, mid, long, answers: one turn, as in simulate.py. scbench: five turns over a context of its own, the
//              nearest to TANGRAM's. shared: three turns over one of four documents (requests.hpp)
// --rate       conversations that arrive in a second, by a Poisson process; saturated: all are there at the beginning
// --requests   conversations; each turn of one is a request in the figures
// --memory     GiB for everything that a cache takes: pages, indexes, packed rows, tables, scratch
// --budget     share of the tokens that stay, or that a step reads; tangram: the mean share of made-up heads
// --chunk      tokens of prompts in one pass through the model, beside one token of every answer
// --sequences  upper bound of the sequences in a cache, stored documents included
// --answer-share  of an answer, counted when its prompt is admitted; 0: as if nobody knew its length
// --prefixes   1: documents are stored for those who ask about them later
// --limit      seconds after which a method stops, with the figures of what it has served; 0: none
// --layers     fewer for a quick run; the record says so. Memory should shrink with them
//
// The clock is the wall's. A request arrives, waits until the bound of its prompt fits, comes in chunks beside the answers of
// others, and is through when its last token is on the host. Passes are launched one by one, not recorded.
#include <cmath>
#include <string>
#include <vector>

#include "model/model_bench.hpp"
#include "served.hpp"

namespace {

using namespace model_bench;
using serving::outcome;
using serving::served_turn;

struct options {
  std::vector<std::string> methods;
  std::string mix = "short", out;
  double rate = 0, memory = 24, budget = 0.25;
  int requests = 60, layers = 32;
  std::uint64_t seed = 1;
  serving::scheduler_options scheduler;
};

double parse_number(const std::string& name, const std::string& value, double lower, double upper) {
  double number = 0;
  tool::parse_value(name, value, "a number", number);
  tessera::require(number > lower && number <= upper, name, value,
                   "above " + tool::value_text(float(lower)) + ", at most " + tool::value_text(float(upper)),
                   "see the file's head");
  return number;
}

options parse(int count, char** arguments) {
  options given;
  for (const auto& entry : serving::served_methods()) given.methods.push_back(entry.name);
  parse_pairs(count, arguments, [&](const std::string& name, const std::string& value) {
    if (name == "--methods") {
      given.methods = tool::parse_list(name, value);
    } else if (name == "--mix") {
      given.mix = serving::find_mix(value).name;
    } else if (name == "--rate") {
      given.rate = value == "saturated" ? 0 : parse_number(name, value, 0, 1e6);
    } else if (name == "--requests") {
      given.requests = int(tool::parse_count(name, value, 1, 1000000));
    } else if (name == "--memory") {
      given.memory = parse_number(name, value, 0, 1e5);
    } else if (name == "--budget") {
      given.budget = parse_number(name, value, 0, 1);
    } else if (name == "--chunk") {
      given.scheduler.chunk = index_t(tool::parse_count(name, value, 64, 1 << 20));
    } else if (name == "--sequences") {
      given.scheduler.sequences = index_t(tool::parse_count(name, value, 2, 1024));
    } else if (name == "--answer-share") {
      given.scheduler.answer_share = value == "0" ? 0 : parse_number(name, value, 0, 1);
    } else if (name == "--prefixes") {
      given.scheduler.shares_prefixes = tool::parse_count(name, value, 0, 1) == 1;
    } else if (name == "--limit") {
      given.scheduler.limit = value == "0" ? 0 : parse_number(name, value, 0, 1e6);
    } else if (name == "--layers") {
      given.layers = int(tool::parse_count(name, value, 1, 32));
    } else if (name == "--seed") {
      given.seed = std::uint64_t(tool::parse_count(name, value, 0));
    } else if (name == "--out") {
      given.out = value;
    } else {
      tessera::fail("option", name, "one of this benchmark", "see the file's head");
    }
  });
  for (const std::string& name : given.methods) serving::find_served(name);
  return given;
}

class serving_benchmark {
 public:
  explicit serving_benchmark(const options& given)
      : given_(given),
        model_(engine::cuda::llama::random(llama_8b(given.layers), 1)),
        conversations_(serving::draw(serving::find_mix(given.mix), given.requests, given.rate,
                                     model_.config().vocab_size, given.seed)),
        record_("bench_serving",
                "Llama-3.1-8B shapes, random bf16 weights, " + std::to_string(given.layers) + " layers, " +
                    tool::value_text(float(given.memory)) + " GiB for the cache",
                "from the first arrival to the last token, wall clock", given.out) {}

  /// How many methods have no figure.
  int run() {
    const serving::mix& workload = serving::find_mix(given_.mix);
    std::printf("%s: %s, %d conversations, %s, %g GiB, budget %g, %d layers\n", workload.name, workload.about,
                given_.requests,
                given_.rate > 0 ? (tool::value_text(float(given_.rate)) + " a second").c_str() : "all at once",
                given_.memory, given_.budget, given_.layers);
    int missing = 0;
    for (const std::string& name : given_.methods) missing += !attempt(name, [&] { serve(name); });
    return missing;
  }

 private:
  void serve(const std::string& name) {
    constexpr double gib = 1 << 30;
    double shown = now_ms();
    const serving::serving_case job{model_,
                                    conversations_,
                                    given_.memory * gib,
                                    given_.budget,
                                    given_.scheduler,
                                    [&](const serving::serving_statistics& counts, int running, int waiting) {
                                      if (now_ms() - shown < 10'000) return;
                                      shown = now_ms();
                                      std::printf("  %-12s %4zu requests served, %3d running, %3d waiting\n",
                                                  name.c_str(), counts.turns.size(), running, waiting);
                                      std::fflush(stdout);
                                    }};
    const outcome found = serving::find_served(name).serve(job);
    report(name, found);
  }

  void report(const std::string& name, const outcome& found) {
    constexpr double gib = 1 << 30;
    const serving::serving_statistics& counts = found.counts;
    const auto waits = values(counts, [](const served_turn& entry) { return 1e3 * entry.wait(); });
    const auto first_waits = first_turns(counts);
    const auto tokens = values(counts, [](const served_turn& entry) { return 1e3 * entry.token_time(); });
    const double rate = counts.turns_per_second();
    if (name == "full") full_rate_ = rate;
    const double beside = full_rate_ > 0 ? rate / full_rate_ : 0;
    char ratio[40] = "";
    if (beside > 0) std::snprintf(ratio, sizeof ratio, " (%.2f of full)", beside);
    std::printf("%-12s %7.3f requests/s%s  first token %8.0f ms, p50 %8.0f, p90 %8.0f, p99 %8.0f  token %6.1f ms\n",
                name.c_str(), rate, ratio, serving::mean(waits), serving::percentile(waits, 0.5),
                serving::percentile(waits, 0.9), serving::percentile(waits, 0.99), serving::mean(tokens));
    if (counts.unfinished > 0) std::printf("%-12s %d conversations had not ended\n", "", counts.unfinished);
    std::printf(
        "%-12s %.1f s, batch %.1f, at most %d of %d; %d preempted, %d rewritten, %d swapped out (%.2f s, %.2f "
        "GiB) and %d in (%.2f s); %d prefix hits; pool %.2f of %.2f GiB, beside it %.2f\n",
        "", counts.seconds, counts.mean_batch(), counts.largest_batch, int(found.sequences), counts.preemptions,
        counts.rewritten, counts.swaps.out, counts.swaps.out_seconds, counts.swaps.bytes / gib, counts.swaps.in,
        counts.swaps.in_seconds, int(counts.prefix_hits), found.peak_pool_bytes / gib, found.pool_bytes / gib,
        found.other_bytes / gib);
    std::fflush(stdout);
    nlohmann::ordered_json more{{"requests", counts.turns.size()}, {"requests_per_second", rate}};
    more["unfinished"] = counts.unfinished;
    if (full_rate_ > 0) more["of_full"] = beside;
    more["first_token_ms"] = spread(waits);
    more["first_token_of_first_turns_ms"] = spread(first_waits);
    more["token_ms"] = spread(tokens);
    more["mix"] = given_.mix, more["rate"] = given_.rate, more["conversations"] = given_.requests;
    more["memory_gib"] = given_.memory, more["budget"] = given_.budget, more["layers"] = given_.layers;
    more["chunk"] = given_.scheduler.chunk, more["answer_share"] = given_.scheduler.answer_share;
    more["stores_prefixes"] = given_.scheduler.shares_prefixes;
    more["sequences"] = found.sequences, more["mean_batch"] = counts.mean_batch();
    more["largest_batch"] = counts.largest_batch;
    more["passes"] = counts.passes,
    more["pass_ms"] = 1e3 * counts.pass_seconds / double(std::max<std::int64_t>(1, counts.passes));
    more["step_passes"] = counts.step_passes;
    more["step_pass_ms"] = 1e3 * counts.step_pass_seconds / double(std::max<std::int64_t>(1, counts.step_passes));
    more["launch_ms"] = 1e3 * found.launch_seconds / double(std::max<std::int64_t>(1, counts.step_passes));
    more["prompt_tokens"] = counts.prompt_tokens, more["step_tokens"] = counts.step_tokens;
    more["outside_passes_s"] = counts.seconds - counts.pass_seconds;
    more["preemptions"] = counts.preemptions, more["rewritten"] = counts.rewritten;
    more["swapped_out"] = counts.swaps.out, more["swapped_in"] = counts.swaps.in;
    more["swap_out_s"] = counts.swaps.out_seconds, more["swap_in_s"] = counts.swaps.in_seconds;
    more["swapped_bytes"] = counts.swaps.bytes;
    more["prefix_hits"] = counts.prefix_hits, more["prefix_tokens"] = counts.prefix_tokens;
    more["pool_bytes"] = found.pool_bytes, more["peak_pool_bytes"] = found.peak_pool_bytes;
    more["other_bytes"] = found.other_bytes, more["most_bytes"] = found.most_bytes;
    record_.add("serving/" + given_.mix + "/" + name, 1e3 * counts.seconds, more);
  }
  static nlohmann::ordered_json spread(const std::vector<double>& all) {
    return {{"mean", serving::mean(all)},
            {"p50", serving::percentile(all, 0.5)},
            {"p90", serving::percentile(all, 0.9)},
            {"p99", serving::percentile(all, 0.99)}};
  }
  static std::vector<double> first_turns(const serving::serving_statistics& counts) {
    std::vector<double> all;
    for (const served_turn& entry : counts.turns) {
      if (entry.number == 0) all.push_back(1e3 * entry.wait());
    }
    return all;
  }

  const options given_;
  engine::cuda::llama model_;
  std::vector<serving::conversation> conversations_;
  record record_;
  double full_rate_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
  return exit_status("bench_serving", [&] { return serving_benchmark(parse(count, arguments)).run(); });
}
