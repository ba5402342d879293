// How often a hidden word is answered, what is held, and how fast answers come: llama.cpp by itself, with evicted
// cells, and with Tessera's attention under methods by name.
//
//   answer MODEL.gguf [--tokens 2000] [--documents 5] [--first 1] [--count ALL] [--answer 12] [--threads 1] [WAY ...]
//
// A WAY is `everything`, `evict:TOKENS`, `streaming:TOKENS` (the first four and the newest), or METHOD or METHOD:BUDGET
// of the library. The prompt's last token comes behind the choice in every way, so that the first word already comes
// from what is left. `--first` and `--count` take some of the documents, so that several processes share them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "needle.hpp"
#include "tessera_llama/attend.hpp"
#include "tessera_llama/evict.hpp"

using namespace tessera_llama;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct outcome {
  std::string said;
  double prompt_seconds = 0, choice_seconds = 0, tokens_a_second = 0, held_megabytes = 0;
};

struct settings {
  int tokens = 2000, documents = 5, first = 1, count = 0, answer = 12, threads = 1;
};

/// Greedy tokens after the prompt's last one; `step(token)` decodes one more. Steps behind the text's end are timed and
/// not said.
template <class Step>
void answer(const loaded_model& model, llama_context* context, llama_token last, int length, outcome& result,
            const Step& step) {
  step(last);
  const double begin = now();
  bool ended = false;
  for (int count = 0; count < length; ++count) {
    const llama_token token = best_token(context, model.vocabulary());
    ended = ended || llama_vocab_is_eog(model.vocabulary(), token);
    if (!ended) result.said += model.piece(token);
    step(token);
  }
  result.tokens_a_second = length / (now() - begin);
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
                       const settings& of) {
  attention own(model.get(), way);
  const auto context = model.context(512, of.threads, own);
  outcome result;
  const double begin = now();
  decode_text(own, context.get(), {document.tokens.begin(), document.tokens.end() - 1});
  result.prompt_seconds = now() - begin;
  own.end_prompt(0);
  result.choice_seconds = now() - begin - result.prompt_seconds;
  result.held_megabytes = double(own.bytes(0)) / 1e6;
  answer(model, context.get(), document.tokens.back(), of.answer, result,
         [&](llama_token token) { decode_text(own, context.get(), {token}); });
  return result;
}

/// llama.cpp's own cells. `decode(context, batch, ends)` decodes a chunk of the prompt, or a step; `choose(context)`
/// drops cells.
template <class Observer, class Decode, class Choose>
outcome with_cells(const loaded_model& model, const needle_document& document, const settings& of, Observer& observer,
                   const Decode& decode, const Choose& choose) {
  const int n = int(document.tokens.size()) - 1, last = 64;  // the last chunk holds the window whose queries score
  const auto context = model.context(n + of.answer + 8, of.threads, observer);
  outcome result;
  const double begin = now();
  token_batch batch(512);
  llama_pos position = 0;
  const auto feed = [&](const llama_token* tokens, int count, bool ends) {
    batch.clear();
    for (int i = 0; i < count; ++i) batch.add(tokens[i], position++, 0, i + 1 == count);
    decode(context.get(), batch.get(), ends);
  };
  while (position < n) {
    const int count = position < n - last ? std::min(512, n - last - position) : n - position;
    feed(document.tokens.data() + position, count, position + count == n);
  }
  result.prompt_seconds = now() - begin;
  choose(context.get());
  result.choice_seconds = now() - begin - result.prompt_seconds;
  result.held_megabytes = double(llama_state_seq_get_size(context.get(), 0)) / 1e6;
  answer(model, context.get(), document.tokens.back(), of.answer, result,
         [&](llama_token token) { feed(&token, 1, false); });
  return result;
}

outcome outcome_of(const loaded_model& model, const needle_document& document, const attention_options& way,
                   const settings& of) {
  if (way.method == "everything") {
    plain_decoder plain;
    return with_cells(
        model, document, of, plain,
        [&](llama_context* context, const llama_batch& batch, bool) { plain.decode(context, batch); },
        [](llama_context*) {});
  }
  const bool streams = way.method == "streaming";
  if (!streams && way.method != "evict") return with_attention(model, document, way, of);
  const index_t keep = way.budget.value_or(512);
  eviction watcher(model.get(), {.threads = of.threads});
  return with_cells(
      model, document, of, watcher,
      [&](llama_context* context, const llama_batch& batch, bool ends) {
        watcher.decode(context, batch, ends && !streams ? 0 : -1);
      },
      [&](llama_context* context) {
        if (!streams) return void(watcher.evict(context, 0, keep));
        std::vector<llama_pos> left;
        const llama_pos n = llama_pos(document.tokens.size()) - 1;
        for (llama_pos i = 0; i < n; ++i)
          if (i < 4 || i >= n - (keep - 4)) left.push_back(i);
        watcher.keep_positions(context, 0, left);
      });
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<std::string> ways;
  std::string path;
  settings of;
  const std::pair<const char*, int*> options[] = {{"--tokens", &of.tokens}, {"--documents", &of.documents},
                                                  {"--first", &of.first},   {"--count", &of.count},
                                                  {"--answer", &of.answer}, {"--threads", &of.threads}};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto option =
        std::find_if(std::begin(options), std::end(options), [&](const auto& one) { return word == one.first; });
    if (option != std::end(options)) {
      tessera::require(i + 1 < argc, word, "alone", "a number behind it", "pass one");
      *option->second = std::atoi(argv[++i]);
      tessera::require(*option->second >= 1, word, argv[i], "at least 1", "pass another number");
    } else if (path.empty()) {
      path = word;
    } else {
      ways.push_back(word);
    }
  }
  if (path.empty()) {
    std::fprintf(stderr,
                 "usage: answer MODEL.gguf [--tokens N] [--documents N] [--first N] [--count N] [--answer N] "
                 "[--threads N] [everything | evict:N | streaming:N | METHOD[:BUDGET] ...]\n");
    return 2;
  }
  const int left = of.documents - of.first + 1, count = of.count > 0 ? of.count : left;
  tessera::require(left >= 1 && count <= left, "documents from --first on", count,
                   "1 to " + std::to_string(std::max(0, left)) + " of --documents", "pass other numbers");
  if (ways.empty()) ways = {"everything", "evict:512", "streaming:512", "full", "snapkv:256", "quest:256"};
  const loaded_model model(path);
  std::printf(
      "| way | right of %d | held MB | prompt s | choice s | tokens/s |\n| --- | --- | --- | --- | --- | --- |\n",
      count);
  for (const std::string& text : ways) {
    const attention_options way = way_of(text, of.threads);
    int right = 0;
    outcome sum;
    for (int d = of.first - 1; d < of.first - 1 + count; ++d) {
      const needle_document document = make_needle(model, of.tokens, (d + 0.5) / of.documents, unsigned(100 + d));
      const outcome one = outcome_of(model, document, way, of);
      right += is_right(one.said, document.word);
      sum.held_megabytes += one.held_megabytes, sum.prompt_seconds += one.prompt_seconds,
          sum.choice_seconds += one.choice_seconds, sum.tokens_a_second += one.tokens_a_second;
      std::fprintf(stderr, "%s, document %d of %d, %zu tokens:%s\n", text.c_str(), d + 1, of.documents,
                   document.tokens.size(), one.said.c_str());
    }
    std::printf("| `%s` | %d | %.1f | %.2f | %.2f | %.2f |\n", text.c_str(), right, sum.held_megabytes / count,
                sum.prompt_seconds / count, sum.choice_seconds / count, sum.tokens_a_second / count);
    std::fflush(stdout);
  }
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
