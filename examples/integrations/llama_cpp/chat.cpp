// A conversation on standard input, under a method of Tessera in an unpatched llama.cpp.
//
//   chat MODEL.gguf [METHOD] [BUDGET] [THREADS] [SESSION]
//
// SESSION is a file: a conversation that was saved there goes on, and is saved there at the end of the input.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

#include "model.hpp"
#include "tessera_llama/attend.hpp"

using namespace tessera_llama;

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: chat MODEL.gguf [METHOD] [BUDGET] [THREADS] [SESSION]\n");
    return 2;
  }
  const int threads = argc > 4 ? std::stoi(argv[4]) : 1;
  loaded_model model(argv[1]);
  attention_options options{argc > 2 ? argv[2] : "snapkv"};
  options.threads = threads;
  if (argc > 3) options.budget = std::stoi(argv[3]);
  attention own(model.get(), options);
  const auto context = model.context(512, threads, own);  // cells for one batch

  const std::string session = argc > 5 ? argv[5] : "";
  if (std::ifstream file{session, std::ios::binary}; !session.empty() && file) {
    own.load(0, [&](void* data, std::size_t bytes) {
      file.read(static_cast<char*>(data), std::streamsize(bytes));
      return std::size_t(file.gcount());
    });
    std::printf("[%d tokens go on]\n", own.next_position(0));
  }

  std::string line;
  for (bool first = !own.has(0); std::printf("> "), std::fflush(stdout), std::getline(std::cin, line); first = false) {
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
  if (!session.empty() && own.has(0)) {
    const std::string unfinished = session + ".part";  // the old session stays until the new one is whole
    std::ofstream file(unfinished, std::ios::binary);
    file.exceptions(std::ios::failbit | std::ios::badbit);
    own.save(0, [&](const void* data, std::size_t bytes) {
      file.write(static_cast<const char*>(data), std::streamsize(bytes));
    });
    file.close();
    std::filesystem::rename(unfinished, session);
    std::printf("\n[saved to %s]\n", session.c_str());
  }
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
