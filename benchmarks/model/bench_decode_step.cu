// A whole decode step of a model of Llama-3.1-8B's shape with random weights: time between tokens and device memory by
// context and method, through the example engine and the tool's caches. One conversation, or several at once; bf16.
//
//   bench_decode_step [--methods full,snapkv] [--budget 2048] [--share 0] [--contexts 32768,131072] [--steps 50]
//                     [--batch 1] [--turn 0] [--layers 32] [--extrapolate 1] [--prompts 2048,32768] [--rows given] [--json FILE]
//
// The prompt's keys and values are random numbers that are put into the cache without running the model over them; then
// every step runs the whole model: one graph launch a token, timed from the host's call to the next token on the host.
// --share is a budget in hundredths of the context, in place of --budget. --batch most: as many conversations as fit,
// at most 64. With --turn the context of a method that packs prompts comes in turns of so many tokens, at least 4,096,
// so that one of them lies whole at a time; steps that pack a full tail, one of 32, are slower than the median.
// --rows stores K and V in a format that the tool was built with (TESSERA_TOOL_ROWS), as its setting of that name does.
// With --prompts nothing is decoded: the model runs over prompts of such lengths, from the host's call to the logits.
// Contexts whose cache does not fit beside the weights are measured with 8 and 4 layers, or 4 and 2, and continued to 32
// by a straight line; their entries say so. --extrapolate 0 leaves them out.
#include <array>
#include <cmath>
#include <memory>
#include <optional>

#include "engine/cuda/ops.hpp"
#include "model_bench.hpp"
#include "tool/backend.hpp"
#include "uncounted.hpp"

namespace {

using namespace model_bench;

struct options {
  std::vector<std::string> methods{"full", "snapkv", "exact_topk"};
  std::vector<index_t> contexts{1024, 32768, 65536, 131072, 262144, 524288, 1048576};
  index_t budget = 2048, share = 0, turn = 0;
  int steps = 50, layers = 32, batch = 1;  // batch 0: as many as fit
  bool extrapolates = true;
  std::vector<index_t> prompts;
  std::string rows = "given", json;
};

options parse(int count, char** arguments) {
  options given;
  parse_pairs(count, arguments, [&](const std::string& name, const std::string& value) {
    if (name == "--methods") {
      given.methods = tool::parse_list(name, value);
    } else if (name == "--contexts") {
      given.contexts = parse_counts(name, value);
    } else if (name == "--prompts") {
      given.prompts = parse_counts(name, value);
    } else if (name == "--budget") {
      given.budget = index_t(tool::parse_count(name, value, 1));
    } else if (name == "--share") {
      given.share = index_t(tool::parse_count(name, value, 0, 100));
    } else if (name == "--turn") {
      given.turn = index_t(tool::parse_count(name, value, 4096));
    } else if (name == "--steps") {
      given.steps = int(tool::parse_count(name, value, 3, 100000));
    } else if (name == "--layers") {
      given.layers = int(tool::parse_count(name, value, 2, 32));
    } else if (name == "--batch") {
      given.batch = value == "most" ? 0 : int(tool::parse_count(name, value, 1, engine::cuda::llama::most_together));
    } else if (name == "--extrapolate") {
      given.extrapolates = tool::parse_count(name, value, 0, 1) == 1;
    } else if (name == "--rows") {
      given.rows = value;
    } else if (name == "--json") {
      given.json = value;
    } else {
      tessera::fail("option", name, "one of this benchmark", "see the file's head");
    }
  });
  return given;
}

struct measured {
  double median_ms = 0, fastest_ms = 0, slowest_ms = 0, prefill_end_ms = 0;
  double peak_bytes = 0;   ///< device memory in use over what was in use before the cache, plus the weights
  double cache_bytes = 0;  ///< what the cache says it holds after the prompt
  double full_bytes = 0, read_bytes = 0;
};

/// Puts random keys and values of a prompt into every layer. The queries are those that the method looks at. Of a text
/// in `segments` one of 20 tokens ends one.
void fill_prompt(engine::cuda::kv_cache& cache, const engine::llama_config& config, index_t count, bool segments,
                 std::uint64_t seed, cudaStream_t stream) {
  constexpr index_t chunk = 8192;
  const auto rows = std::size_t(std::min(chunk, count));
  engine::cuda::device_array<tessera::bf16> q(rows * std::size_t(config.q_size())),
      k(rows * std::size_t(config.kv_size())), v(rows * std::size_t(config.kv_size()));
  cache.reserve(count, stream);
  for (index_t done = 0; done < count; done += chunk) {
    const index_t tokens = std::min(chunk, count - done);
    std::vector<std::uint8_t> ends(segments ? std::size_t(tokens) : 0);
    for (std::size_t i = 0; i < ends.size(); ++i) ends[i] = ((std::uint64_t(done) + i) * 2654435761u >> 12) % 20 == 0;
    cache.begin_chunk(ends);
    engine::cuda::fill_random(q.data(), cache.type(), std::int64_t(q.size()), 1.7f, seed++, stream);
    for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
      engine::cuda::fill_random(k.data(), cache.type(), std::int64_t(k.size()), 1.7f, seed++, stream);
      engine::cuda::fill_random(v.data(), cache.type(), std::int64_t(v.size()), 1.7f, seed++, stream);
      cache.observe(layer, q.data(), k.data(), v.data(), tokens, stream);
    }
  }
  check(cudaStreamSynchronize(stream), "filling the cache");
}

index_t budget_of(index_t context, const options& given) {
  return given.share > 0 ? std::max<index_t>(1, index_t(std::int64_t(context) * given.share / 100)) : given.budget;
}
/// Of a method that packs prompts.
bool comes_in_turns(const tool::method_info& method, const options& given) {
  return method.name == "mosaickv" && given.turn > 0;
}

tool::cache_request request_of(const engine::llama_config& config, const tool::method_info& method, index_t context,
                               int batch, const options& given) {
  tool::cache_request request;
  request.shape = {config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads};
  request.head_dim = config.head_dim;
  request.element = tool::element_type::bf16;
  if (method.has_budget) request.budget = budget_of(context, given);
  request.settings = {{"rows", given.rows}};
  request.conversations = batch;
  request.tokens = context + index_t(given.steps) + 10;
  if (comes_in_turns(method, given)) request.turn_tokens = std::min(given.turn, context);
  // What RocketKV keeps of these contexts is far less than the context: its index need not be made for all of it.
  if (method.name == "rocketkv") request.index_tokens = std::min<index_t>(request.tokens, 16384);
  return request;
}

/// The time of a whole prompt of random tokens, the second of two: the first one loads kernels. In the tool's chunks.
double prompt_ms(engine::cuda::llama& model, const tool::method_info& method, index_t tokens, const options& given) {
  std::vector<engine::token_t> prompt;
  for (index_t i = 0; i < tokens; ++i) prompt.push_back(engine::token_t(1 + std::int64_t(i) * 7919 % 100000));
  engine::prefill_options in_chunks;
  in_chunks.chunk = 2048;
  double time = 0;
  for (int run = 0; run < 2; ++run) {
    const auto cache =
        tool::make_cache(method, tool::backend::cuda, request_of(model.config(), method, tokens, 1, given));
    const double begin = now_ms();
    cache->announce(tokens);
    model.prefill(prompt, *cache->on_device(), in_chunks);
    time = now_ms() - begin;
  }
  return time;
}

measured measure(engine::cuda::llama& model, const tool::method_info& method, index_t context, int batch,
                 const options& given) {
  const engine::llama_config& config = model.config();
  const double before = used_bytes();
  const auto cache = tool::make_cache(method, tool::backend::cuda, request_of(config, method, context, batch, given));
  engine::cuda::kv_cache& on_device = *cache->on_device();
  measured result;
  double most = used_bytes();
  const index_t turn = comes_in_turns(method, given) ? given.turn : context;
  std::uint64_t seed = 1;
  for (int conversation = 0; conversation < batch; ++conversation) {
    on_device.select(conversation);
    for (index_t done = 0; done < context; done += turn, seed += 1 << 16) {
      fill_prompt(on_device, config, std::min(turn, context - done), method.needs_segments, seed, model.stream());
      const double start = now_ms();
      on_device.end_prefill(model.stream());
      check(cudaStreamSynchronize(model.stream()), "ending the prompt");
      result.prefill_end_ms += now_ms() - start;
    }
  }
  most = std::max(most, used_bytes());
  result.cache_bytes = double(cache->bytes());
  result.full_bytes = double(cache->full_bytes(context)) * batch;

  std::vector<double> times;
  std::vector<engine::token_t> tokens(std::size_t(batch), 1);
  uncounted timed(on_device);
  for (int step = 0; step < given.steps + 5; ++step) {  // the first ones load kernels and record the graph
    const double begin = now_ms();
    tokens = model.next(tokens, timed);
    times.push_back(now_ms() - begin);
  }
  most = std::max(most, used_bytes());
  model.next(tokens, on_device);
  times.erase(times.begin(), times.begin() + 5);
  std::sort(times.begin(), times.end());
  result.median_ms = times[times.size() / 2];
  result.fastest_ms = times.front();
  result.slowest_ms = times.back();
  result.read_bytes = double(cache->reads().bytes) / cache->reads().steps;
  result.peak_bytes = most - before + double(model.weight_bytes());
  return result;
}

/// How many conversations fit, by what one and two take; 1 where two do not. Errors: one does not.
int largest_batch(engine::cuda::llama& model, const tool::method_info& method, index_t context, const options& given) {
  constexpr double spare = 1.5e9;  // what the end of a prompt and graphs allocate
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  std::array<double, 2> taken{};
  for (int batch = 1; batch <= 2; ++batch) {
    try {
      const auto cache =
          tool::make_cache(method, tool::backend::cuda, request_of(model.config(), method, context, batch, given));
      taken[std::size_t(batch - 1)] = used_bytes() - double(total - free);
    } catch (const tessera::error&) {
      if (batch == 1) throw;
      return 1;
    }
  }
  const double more = (double(free) - spare - taken[0]) / (taken[1] - taken[0]);
  return std::clamp(1 + int(std::floor(more)), 1, engine::cuda::llama::most_together);
}

/// The straight line through two numbers of layers, at `layers`. The fastest and the slowest step are left out: a line
/// through two extremes means nothing.
measured extrapolated(const measured& few, const measured& fewer, int few_layers, int fewer_layers, int layers) {
  measured result;
  for (const auto member : {&measured::median_ms, &measured::prefill_end_ms, &measured::peak_bytes,
                            &measured::cache_bytes, &measured::full_bytes, &measured::read_bytes}) {
    const double slope = (few.*member - fewer.*member) / (few_layers - fewer_layers);
    result.*member = few.*member + slope * (layers - few_layers);
  }
  return result;
}

class steps_benchmark {
 public:
  explicit steps_benchmark(const options& given)
      : given_(given),
        record_("bench_decode_step",
                "Llama-3.1-8B shapes, random bf16 weights, batch " +
                    (given.batch > 0 ? std::to_string(given.batch) : std::string("as large as fits")) + ", " +
                    std::to_string(given.layers) + " layers",
                "median over " + std::to_string(given.steps) + " steps, host to host, one graph launch each",
                given.json) {}

  /// How many rows have no figure.
  int run() {
    std::printf("%-28s %10s %10s %10s %9s %9s %9s %10s\n", "method/context", "ms/token", "fastest", "slowest",
                "peak GiB", "cache GiB", "read GiB", "tokens/s");
    std::vector<cell> left;
    int missing = 0;
    {
      auto model = engine::cuda::llama::random(llama_8b(given_.layers), 1);
      for (const index_t tokens : given_.prompts) {
        for (const std::string& method : given_.methods) {
          const std::string name = "prompt/" + method + "/" + std::to_string(tokens);
          missing += !attempt(name, [&] {
            measured found;
            found.median_ms = prompt_ms(model, tool::find_method(method), tokens, given_);
            report(name, found, 1, "");
          });
        }
      }
      if (!given_.prompts.empty()) return missing;
      for (const index_t context : given_.contexts) {
        for (const std::string& name : given_.methods) {
          const cell wanted{&tool::find_method(name), context, given_.batch};
          if (!measure_whole(model, wanted)) left.push_back({wanted.method, context, std::max(1, given_.batch)});
        }
      }
    }
    if (given_.extrapolates) left = extrapolated_rows(std::move(left));
    return int(left.size());
  }

 private:
  struct cell {
    const tool::method_info* method;
    index_t context;
    int batch;
  };

  /// With all layers, where that fits. A batch that was found by the size of empty caches may be one or two too large.
  bool measure_whole(engine::cuda::llama& model, cell wanted) {
    int smallest = wanted.batch;
    if (wanted.batch == 0) {
      const bool any = attempt(name_of(wanted),
                               [&] { wanted.batch = largest_batch(model, *wanted.method, wanted.context, given_); });
      if (!any) return false;
      smallest = std::max(1, wanted.batch - 2);
    }
    for (; wanted.batch >= smallest; --wanted.batch) {
      const bool fits = attempt(name_of(wanted), [&] {
        report(name_of(wanted), measure(model, *wanted.method, wanted.context, wanted.batch, given_), wanted.batch, "");
      });
      if (fits) return true;
    }
    return false;
  }

  /// Reports rows from fewer layers; those for which even these do not fit are returned.
  std::vector<cell> extrapolated_rows(std::vector<cell> left) {
    for (const auto& [few, fewer] : {std::pair{8, 4}, std::pair{4, 2}}) {
      if (left.empty()) break;
      std::vector<std::optional<measured>> more(left.size()), less(left.size());
      for (const int layers : {few, fewer}) {
        auto model = engine::cuda::llama::random(llama_8b(layers), 1);
        for (std::size_t i = 0; i < left.size(); ++i) {
          if (layers == fewer && !more[i]) continue;
          attempt(name_of(left[i]) + ", " + std::to_string(layers) + " layers", [&] {
            (layers == few ? more : less)[i] = measure(model, *left[i].method, left[i].context, left[i].batch, given_);
          });
        }
      }
      std::vector<cell> missing;
      for (std::size_t i = 0; i < left.size(); ++i) {
        if (!less[i]) {
          missing.push_back(left[i]);
          continue;
        }
        report(name_of(left[i]), extrapolated(*more[i], *less[i], few, fewer, given_.layers), left[i].batch,
               "extrapolated from " + std::to_string(few) + " and " + std::to_string(fewer) + " layers");
      }
      left = std::move(missing);
    }
    return left;
  }

  std::string name_of(const cell& which) const {
    const std::string budget = given_.share > 0 ? std::to_string(given_.share) + "%" : std::to_string(given_.budget);
    return which.method->name + (which.method->has_budget ? "_" + budget : "") +
           (given_.rows == "given" ? "" : "_" + given_.rows) + "/" + std::to_string(which.context) +
           (which.batch > 1 ? "/B" + std::to_string(which.batch) : "");
  }

  /// `how`: by which layers it was extrapolated, or nothing.
  void report(const std::string& name, const measured& found, int batch, const std::string& how) {
    constexpr double gib = 1 << 30;
    const auto ms = [&](double value) { return how.empty() ? std::to_string(value).substr(0, 6) : std::string("-"); };
    const double each_second = 1000 * batch / found.median_ms;
    std::printf("%-28s %10.3f %10s %10s %9.2f %9.2f %9.3f %10.2f  %s\n", name.c_str(), found.median_ms,
                ms(found.fastest_ms).c_str(), ms(found.slowest_ms).c_str(), found.peak_bytes / gib,
                found.cache_bytes / gib, found.read_bytes / gib, each_second, how.c_str());
    std::fflush(stdout);
    nlohmann::ordered_json more;
    if (how.empty()) more["fastest_ms"] = found.fastest_ms, more["slowest_ms"] = found.slowest_ms;
    more["end_of_prompt_ms"] = found.prefill_end_ms;
    more["peak_bytes"] = found.peak_bytes;
    more["cache_bytes"] = found.cache_bytes;
    more["full_cache_bytes"] = found.full_bytes;
    more["bytes_read_per_step"] = found.read_bytes;
    more["tokens_per_second"] = each_second;
    more["layers"] = given_.layers;
    more["extrapolated"] = !how.empty();
    if (!how.empty()) more["how"] = how;
    record_.add(name, found.median_ms, more);
  }

  const options given_;
  record record_;
};

}  // namespace

int main(int count, char** arguments) {
  return exit_status("bench_decode_step", [&] { return steps_benchmark(parse(count, arguments)).run(); });
}
