// How often a hidden word is answered, what is held, and how fast answers come: llama.cpp by itself, with evicted cells, and with
// Tessera's attention under methods by name.
//
//   answer MODEL.gguf [--tokens 2000] [--documents 5] [--threads 1] [WAY ...]
//
// A WAY is `everything`, `evict:TOKENS`, `streaming:TOKENS` (the first four and the newest), or METHOD or METHOD:BUDGET of the library.
// The prompt's last token comes behind the choice in every way, so that the first word already comes from what is left.
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>

#include "needle.hpp"
#include "tessera_llama/attend.hpp"
#include "tessera_llama/evict.hpp"

using namespace tessera_llama;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct outcome {
  std::string said;
  double prompt_seconds = 0, tokens_a_second = 0, held_megabytes = 0;
};

/// Greedy tokens after the prompt's last one; `step(token)` decodes one more.
template <class Step>
void answer(const loaded_model& model, llama_context* context, llama_token last, outcome& result, const Step& step) {
  constexpr int most = 12;
  step(last);
  const double begin = now();
  int count = 0;
  for (llama_token token = best_token(context, model.vocabulary());
       count < most && !llama_vocab_is_eog(model.vocabulary(), token); ++count) {
    result.said += model.piece(token);
    step(token);
    token = best_token(context, model.vocabulary());
  }
  result.tokens_a_second = count / (now() - begin);
}

/// What a WAY says: NAME, NAME:TOKENS or NAME:TOKENS:PARAMETER=VALUE,PARAMETER=VALUE.
attention_options way_of(const std::string& text, int threads) {
  attention_options way;
  way.threads = threads;
  const std::size_t colon = std::min(text.find(':'), text.size()),
                    next = std::min(text.find(':', colon + 1), text.size());
  way.method = text.substr(0, colon);
  if (colon < text.size()) {
    const std::string number = text.substr(colon + 1, next - colon - 1);
    const int tokens = std::atoi(number.c_str());
    tessera::require(tokens >= 1, "tokens of " + text, "'" + number + "'", "at least 1",
                     "pass a number behind the colon");
    way.budget = tokens;
  }
  for (std::size_t at = next + 1; at < text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size()), equals = text.find('=', at);
    tessera::require(equals < end, "parameter of " + text, text.substr(at, end - at), "NAME=VALUE",
                     "separate them by commas");
    way.settings.push_back({text.substr(at, equals - at), text.substr(equals + 1, end - equals - 1)});
    at = end + 1;
  }
  return way;
}

outcome with_attention(const loaded_model& model, const needle_document& document, const attention_options& way,
                       int threads) {
  attention own(model.get(), way);
  const auto context = model.context(512, threads, own);
  outcome result;
  const double begin = now();
  decode_text(own, context.get(), {document.tokens.begin(), document.tokens.end() - 1});
  own.end_prompt(0);
  result.prompt_seconds = now() - begin;
  result.held_megabytes = double(own.bytes(0)) / 1e6;
  answer(model, context.get(), document.tokens.back(), result,
         [&](llama_token token) { decode_text(own, context.get(), {token}); });
  return result;
}

/// keep 0: everything stays.
outcome with_cells(const loaded_model& model, const needle_document& document, index_t keep, bool streaming,
                   int threads) {
  eviction watcher(model.get(), {.threads = threads});
  const auto context = model.context(int(document.tokens.size()) + 64, threads, watcher);
  outcome result;
  const int n = int(document.tokens.size()) - 1, last = 64;
  const double begin = now();
  token_batch batch(512);
  llama_pos position = 0;
  const auto feed = [&](const llama_token* tokens, int count, llama_seq_id observed) {
    batch.clear();
    for (int i = 0; i < count; ++i) batch.add(tokens[i], position++, 0, i + 1 == count);
    watcher.decode(context.get(), batch.get(), observed);
  };
  while (position < n) {
    const int count = position < n - last ? std::min(512, n - last - position) : n - position;
    feed(document.tokens.data() + position, count, keep > 0 && position + count == n ? 0 : -1);
  }
  if (keep > 0 && streaming) {
    std::vector<llama_pos> left;
    for (llama_pos i = 0; i < n; ++i)
      if (i < 4 || i >= n - (keep - 4)) left.push_back(i);
    watcher.keep_positions(context.get(), 0, left);
  } else if (keep > 0) {
    watcher.evict(context.get(), 0, keep);
  }
  result.prompt_seconds = now() - begin;
  result.held_megabytes = double(llama_state_seq_get_size(context.get(), 0)) / 1e6;
  answer(model, context.get(), document.tokens.back(), result, [&](llama_token token) { feed(&token, 1, -1); });
  return result;
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<std::string> ways;
  std::string path;
  int tokens = 2000, documents = 5, threads = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto number = [&] {
      tessera::require(i + 1 < argc, word, "alone", "a number behind it", "pass one");
      const int value = std::atoi(argv[++i]);
      tessera::require(value >= 1, word, value, "at least 1", "pass another number");
      return value;
    };
    if (word == "--tokens")
      tokens = number();
    else if (word == "--documents")
      documents = number();
    else if (word == "--threads")
      threads = number();
    else if (path.empty())
      path = word;
    else
      ways.push_back(word);
  }
  if (path.empty()) {
    std::fprintf(stderr,
                 "usage: answer MODEL.gguf [--tokens N] [--documents N] [--threads N] [everything | evict:N | "
                 "streaming:N | METHOD[:BUDGET] ...]\n");
    return 2;
  }
  if (ways.empty()) ways = {"everything", "evict:512", "streaming:512", "full", "snapkv:256", "quest:256"};
  const loaded_model model(path);
  std::printf("| way | right of %d | held MB | prompt s | tokens/s |\n| --- | --- | --- | --- | --- |\n", documents);
  for (const std::string& way : ways) {
    const attention_options said = way_of(way, threads);
    const std::string& name = said.method;
    int right = 0;
    outcome sum;
    for (int d = 0; d < documents; ++d) {
      const needle_document document = make_needle(model, tokens, (d + 0.5) / documents, unsigned(100 + d));
      const bool by_cells = name == "everything" || name == "evict" || name == "streaming";
      const outcome one = by_cells ? with_cells(model, document, said.budget.value_or(0), name == "streaming", threads)
                                   : with_attention(model, document, said, threads);
      right += is_right(one.said, document.word);
      sum.held_megabytes += one.held_megabytes, sum.prompt_seconds += one.prompt_seconds,
          sum.tokens_a_second += one.tokens_a_second;
      std::fprintf(stderr, "%s, document %d of %d, %zu tokens:%s\n", way.c_str(), d + 1, documents,
                   document.tokens.size(), one.said.c_str());
    }
    std::printf("| `%s` | %d | %.1f | %.1f | %.1f |\n", way.c_str(), right, sum.held_megabytes / documents,
                sum.prompt_seconds / documents, sum.tokens_a_second / documents);
    std::fflush(stdout);
  }
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
