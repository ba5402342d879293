// Whole turns of a model of Llama-3.1-8B's shape whose attention lies along lines (engine/cuda/line_weights.hpp): the
// time to the first token by prompt length and method, that of answers, and a second turn. One conversation; bf16.
//
//   bench_turns [--methods full,loopserve_prefill] [--prompts 32768,131072] [--answers 40,80,120] [--next 2048]
//               [--budget 1024] [--chunk 0] [--layers 32] [--warm 8192] [--lines 1] [--json FILE]
//
// A prompt of random tokens passes through the model, `--chunk` tokens at a time, 0: all of it; the time to the first
// token ends with the logits on the host. A turn's time is that to the last token of its answer, whose steps are graph
// launches; the first of a conversation is launched directly, the next ones are recorded. Then a prompt of `--next`
// tokens and its answer follow; 0: none.
// Before it is timed a method has a prompt of `--warm` tokens and its answer; 0: none. One that chooses lines has a
// prompt of the length to be timed, too, in which it writes them down: the share of causal pairs on the lines stands
// beside the times. --lines 0 leaves that out.
#include <memory>

#include "engine/cuda/kv_cache.hpp"
#include "model_bench.hpp"
#include "tool/backend.hpp"
#include "uncounted.hpp"

namespace {

using namespace model_bench;
using engine::token_t;

struct options {
  std::vector<std::string> methods{"full", "loopserve_prefill", "loopserve", "loopserve_decode"};
  std::vector<index_t> prompts{32768, 65536, 131072}, answers{40, 80, 120};
  index_t next = 2048, budget = 1024, chunk = 0, warm = 8192;
  int layers = 32;
  bool lines = true;
  std::string json;
};

options parse(int count, char** arguments) {
  options given;
  parse_pairs(count, arguments, [&](const std::string& name, const std::string& value) {
    if (name == "--methods") {
      given.methods = tool::parse_list(name, value);
    } else if (name == "--prompts") {
      given.prompts = parse_counts(name, value);
    } else if (name == "--answers") {
      given.answers = parse_counts(name, value);
    } else if (name == "--next") {
      given.next = index_t(tool::parse_count(name, value, 0));
    } else if (name == "--budget") {
      given.budget = index_t(tool::parse_count(name, value, 1));
    } else if (name == "--chunk") {
      given.chunk = index_t(tool::parse_count(name, value, 0));
    } else if (name == "--warm") {
      given.warm = index_t(tool::parse_count(name, value, 0));
    } else if (name == "--layers") {
      given.layers = int(tool::parse_count(name, value, 1, 32));
    } else if (name == "--lines") {
      given.lines = tool::parse_count(name, value, 0, 1) == 1;
    } else if (name == "--json") {
      given.json = value;
    } else {
      tessera::fail("option", name, "one of this benchmark", "see the file's head");
    }
  });
  std::sort(given.answers.begin(), given.answers.end());
  return given;
}

std::unique_ptr<tool::method_cache> empty_cache(const engine::cuda::llama& model, const tool::method_info& method,
                                                index_t tokens, const options& given) {
  const engine::llama_config& config = model.config();
  tool::cache_request request;
  request.shape = {config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads};
  request.head_dim = config.head_dim;
  request.element = tool::element_type::bf16;
  if (method.has_budget) request.budget = given.budget;
  request.tokens = tokens + given.next + 2 * given.answers.back() + 10;
  auto cache = tool::make_cache(method, tool::backend::cuda, request);
  cache->announce(tokens);
  return cache;
}

/// Share of the causal pairs of a chunk that are computed: those on lines, each counted once, and all of its dense rows.
double density(const tessera::prompt_lines& lines, const tessera::line_set& head) {
  std::vector<index_t> nearer(std::size_t(lines.next) + 1, 0);  // slashes at less than a distance
  for (const index_t distance : head.slash) ++nearer[std::size_t(distance) + 1];
  for (std::size_t i = 1; i < nearer.size(); ++i) nearer[i] += nearer[i - 1];
  double on_lines = 0, pairs = 0;
  for (index_t row = lines.first; row < lines.next; ++row) {
    pairs += row + 1;
    on_lines += row >= lines.dense_from ? row + 1 : nearer[std::size_t(row) + 1];
  }
  for (const index_t column : head.vertical) {
    const index_t first = std::max(lines.first, column), end = lines.dense_from;
    if (first < end)
      on_lines += end - first - (nearer[std::size_t(end - column)] - nearer[std::size_t(first - column)]);
  }
  return on_lines / pairs;
}

struct densities {
  double mean = 0, least = 1, most = 0;
};
/// Over layers and query heads; of the last chunk.
densities densities_of(const tool::method_cache& cache, int layers) {
  densities found;
  int count = 0;
  for (int layer = 0; layer < layers; ++layer) {
    const tessera::prompt_lines lines = cache.lines(layer);
    for (const tessera::line_set& head : lines.heads) {
      const double own = density(lines, head);
      found.mean += own, ++count;
      found.least = std::min(found.least, own), found.most = std::max(found.most, own);
    }
  }
  found.mean /= std::max(1, count);
  return found;
}

struct turn_times {
  double first_token = 0;
  std::vector<double> answers;  ///< from the turn's beginning to the last token of each length
};

turn_times timed_turn(engine::cuda::llama& model, engine::cuda::kv_cache& on_device, const std::vector<token_t>& prompt,
                      const options& given) {
  engine::prefill_options in_chunks;
  in_chunks.chunk = given.chunk > 0 ? given.chunk : std::int32_t(prompt.size());
  turn_times times;
  const double begin = now_ms();
  token_t token = engine::best_token(model.prefill(prompt, on_device, in_chunks));
  times.first_token = now_ms() - begin;
  index_t outputs = 1;
  for (const index_t length : given.answers) {
    for (; outputs < length; ++outputs) token = model.next(token, on_device);
    times.answers.push_back(now_ms() - begin);
  }
  return times;
}

class turns_benchmark {
 public:
  explicit turns_benchmark(const options& given)
      : given_(given),
        model_(engine::cuda::llama::with_lines(llama_8b(given.layers), 1)),
        record_("bench_turns",
                "Llama-3.1-8B shapes, random bf16 weights with attention along lines, " + std::to_string(given.layers) +
                    " layers",
                "from the host's call to the logits or the token on the host", given.json) {}

  /// How many rows have no figure.
  int run() {
    int missing = 0;
    for (const std::string& name : given_.methods) {
      const tool::method_info& method = tool::find_method(name);
      attempt(name, [&] {
        if (given_.warm == 0) return;
        const auto cache = empty_cache(model_, method, given_.warm, given_);
        uncounted on_device(*cache->on_device());
        timed_turn(model_, on_device, random_prompt(given_.warm, 9), given_);
      });
      for (const index_t tokens : given_.prompts) missing += !attempt(name, [&] { measure(method, tokens); });
    }
    return missing;
  }

 private:
  void measure(const tool::method_info& method, index_t tokens) {
    const std::string name = method.name + (method.has_budget ? "_" + std::to_string(given_.budget) : "");
    const auto prompt = random_prompt(tokens, 1);
    nlohmann::ordered_json more{{"layers", given_.layers}, {"chunk", given_.chunk > 0 ? given_.chunk : tokens}};
    if (method.chooses_lines && given_.lines) more.update(traced(method, prompt));
    const auto cache = empty_cache(model_, method, tokens, given_);
    uncounted on_device(*cache->on_device());
    report(name + "/" + std::to_string(tokens), timed_turn(model_, on_device, prompt, given_), more);
    if (given_.next == 0) return;
    const auto next = random_prompt(given_.next, 2);
    report(name + "/" + std::to_string(tokens) + "/then/" + std::to_string(given_.next),
           timed_turn(model_, on_device, next, given_), more);
  }

  nlohmann::ordered_json traced(const tool::method_info& method, const std::vector<token_t>& prompt) {
    const auto cache = empty_cache(model_, method, index_t(prompt.size()), given_);
    if (!cache->trace_lines()) return {};
    engine::prefill_options in_chunks;
    in_chunks.chunk = given_.chunk > 0 ? given_.chunk : std::int32_t(prompt.size());
    model_.prefill(prompt, *cache->on_device(), in_chunks);
    const densities found = densities_of(*cache, given_.layers);
    const tessera::prompt_lines last = cache->lines(given_.layers - 1);
    if (last.heads.empty()) return {};
    std::printf("%-28s on lines: %.4f of pairs (%.4f to %.4f by layer and head); last head %zu slashes, %zu columns\n",
                method.name.c_str(), found.mean, found.least, found.most, last.heads.back().slash.size(),
                last.heads.back().vertical.size());
    return {{"density", found.mean}, {"least_density", found.least}, {"most_density", found.most}};
  }

  void report(const std::string& name, const turn_times& times, nlohmann::ordered_json more) {
    std::printf("%-36s first token %9.1f ms", name.c_str(), times.first_token);
    for (std::size_t i = 0; i < times.answers.size(); ++i) {
      std::printf("   %d tokens %9.1f", int(given_.answers[i]), times.answers[i]);
      more["turn_of_" + std::to_string(given_.answers[i]) + "_ms"] = times.answers[i];
    }
    std::printf("\n");
    std::fflush(stdout);
    record_.add("turn/" + name, times.first_token, more);
  }

  const options given_;
  engine::cuda::llama model_;
  record record_;
};

}  // namespace

int main(int count, char** arguments) {
  return exit_status("bench_turns", [&] { return turns_benchmark(parse(count, arguments)).run(); });
}
