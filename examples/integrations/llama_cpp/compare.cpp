// How far three attentions are from each other in a whole model: llama.cpp with cells of fp32 and no flash attention, llama.cpp with flash
// attention over fp16, and Tessera's `full`. All get the first one's greedy tokens.
//
//   compare MODEL.gguf [--prompts 10] [--tokens 200] [--length 600]
#include <cmath>
#include <cstdio>
#include <string>

#include "needle.hpp"
#include "tessera_llama/attend.hpp"

using namespace tessera_llama;

namespace {

struct distances {
  double sum = 0, worst_margin = 0;
  long logits = 0;
  int other_tokens = 0;
  void add(const float* own, const float* exact, int count) {
    const auto best = std::max_element(own, own + count) - own, right = std::max_element(exact, exact + count) - exact;
    for (int i = 0; i < count; ++i) sum += std::abs(double(own[i]) - exact[i]);
    logits += count;
    if (best == right) return;
    ++other_tokens;
    worst_margin = std::max(worst_margin, double(exact[right]) - exact[best]);
  }
  void print(const char* name) const {
    std::printf("| %s | %.4f | %d | %.3f |\n", name, sum / double(logits), other_tokens, worst_margin);
  }
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: compare MODEL.gguf [--prompts N] [--tokens N] [--length N]\n");
    return 2;
  }
  int prompts = 10, tokens = 200, length = 600;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string word = argv[i];
    int* const to = word == "--prompts"  ? &prompts
                    : word == "--tokens" ? &tokens
                    : word == "--length" ? &length
                                         : nullptr;
    tessera::require(to != nullptr, "option", word, "--prompts, --tokens or --length", "see the head of compare.cpp");
    *to = std::atoi(argv[i + 1]);
    tessera::require(*to >= 1, word, argv[i + 1], "at least 1", "pass another number");
  }
  const loaded_model model(argv[1]);
  const int vocabulary = llama_vocab_n_tokens(model.vocabulary());
  distances flash, own;
  for (int p = 0; p < prompts; ++p) {
    const std::vector<llama_token> prompt = make_needle(model, length, 0.5, unsigned(500 + p)).tokens;
    plain_decoder exact_way{.flash = false}, flash_way;
    attention own_way(model.get(), {"full"});
    const int cells = int(prompt.size()) + tokens + 8;
    const auto exact = model.context(cells, 1, exact_way), fast = model.context(cells, 1, flash_way),
               ours = model.context(512, 1, own_way);
    decode_text(exact_way, exact.get(), prompt);
    decode_text(flash_way, fast.get(), prompt);
    decode_text(own_way, ours.get(), prompt);
    own_way.end_prompt(0);
    for (int i = 0; i < tokens; ++i) {
      const float* const truth = llama_get_logits_ith(exact.get(), -1);
      flash.add(llama_get_logits_ith(fast.get(), -1), truth, vocabulary);
      own.add(llama_get_logits_ith(ours.get(), -1), truth, vocabulary);
      const llama_token next = best_token(exact.get(), model.vocabulary());
      decode_text(exact_way, exact.get(), {next});
      decode_text(flash_way, fast.get(), {next});
      decode_text(own_way, ours.get(), {next});
    }
    std::fprintf(stderr, "prompt %d of %d, %zu tokens\n", p + 1, prompts, prompt.size());
  }
  std::printf("Against llama.cpp with cells of fp32 and no flash attention, %d prompts, %d tokens each:\n\n", prompts,
              tokens);
  std::printf(
      "| | mean absolute difference of logits | tokens chosen otherwise | largest margin of these |\n| --- | --- | --- "
      "| --- |\n");
  flash.print("llama.cpp, flash attention");
  own.print("Tessera, `full`");
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
