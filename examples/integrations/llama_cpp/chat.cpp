// A conversation on standard input, under a method of Tessera in an unpatched llama.cpp.
//
//   chat MODEL.gguf [METHOD] [BUDGET] [THREADS]
#include <cstdio>
#include <iostream>
#include <string>

#include "model.hpp"
#include "tessera_llama/attend.hpp"

using namespace tessera_llama;

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: chat MODEL.gguf [METHOD] [BUDGET] [THREADS]\n");
    return 2;
  }
  const int threads = argc > 4 ? std::stoi(argv[4]) : 1;
  loaded_model model(argv[1]);
  attention_options options{argc > 2 ? argv[2] : "snapkv"};
  options.threads = threads;
  if (argc > 3) options.budget = std::stoi(argv[3]);
  attention own(model.get(), options);
  const auto context = model.context(512, threads, own);  // cells for one batch

  std::string line;
  for (bool first = true; std::printf("> "), std::fflush(stdout), std::getline(std::cin, line); first = false) {
    const std::string turn = model.turn(line, first);
    if (!first) own.begin_prompt(0);
    decode_text(own, context.get(), model.tokens(turn, first));
    own.end_prompt(0);
    llama_token token = best_token(context.get(), model.vocabulary());
    for (int i = 0; i < 512 && !llama_vocab_is_eog(model.vocabulary(), token); ++i) {
      std::printf("%s", model.piece(token).c_str());
      std::fflush(stdout);
      decode_text(own, context.get(), {token});
      token = best_token(context.get(), model.vocabulary());
    }
    // The turn's end belongs to the conversation.
    if (!llama_vocab_is_eog(model.vocabulary(), token)) token = llama_vocab_eot(model.vocabulary());
    if (token != LLAMA_TOKEN_NULL) decode_text(own, context.get(), {token});
    std::printf("\n[%d tokens, %.2f MB of %.2f held]\n", own.next_position(0), double(own.bytes(0)) / 1e6,
                double(own.full_bytes(0)) / 1e6);
  }
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
