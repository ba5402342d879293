// What a long prompt leaves in memory: llama.cpp by itself, and Tessera's attention over a context whose cells hold one
// batch. Linux.
//
//   memory MODEL.gguf [--tokens 7000] [--method snapkv] [--budget 256] [--threads 1]
//
// Each case is a process of its own. It reads its resident private memory (`Anonymous` of /proc/self/smaps_rollup: no
// mapped weights, no code) where the model is loaded, and again behind the prompt and one step. A third case, llama.cpp
// with cells for one batch and a prompt that fills them, says what the context's other buffers take: rows are what a
// case has beyond these.
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

#include "needle.hpp"
#include "tessera_llama/attend.hpp"

using namespace tessera_llama;

namespace {

/// Bytes.
struct usage {
  double resident = 0;  ///< behind the prompt and a step, beyond what the loaded model takes
  double trimmed = 0;   ///< the same when the allocator has given back what it can
  double peak = 0;      ///< the most that was resident after a chunk of the prompt
  double rows = 0;      ///< what the library, or llama.cpp, says its rows take
};

double private_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("Anonymous:", 0) == 0) return 1024 * std::stod(line.substr(10));
  }
  tessera::fail("resident memory", "unknown", "a line `Anonymous` in /proc/self/smaps_rollup", "run on Linux 4.14 on");
}

/// `run` in a process of its own, so that no case sees what another one leaves.
usage apart(const std::function<usage()>& run) {
  int ends[2];
  tessera::require(pipe(ends) == 0, "pipe", "not made", "one", "free some files");
  const pid_t child = fork();
  tessera::require(child >= 0, "process", "not made", "one", "free some memory");
  if (child == 0) {
    try {
      const usage result = run();
      if (write(ends[1], &result, sizeof result) == ssize_t(sizeof result)) _exit(0);
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "%s\n", problem.what());
    }
    _exit(1);
  }
  close(ends[1]);
  usage result;
  const bool read_whole = read(ends[0], &result, sizeof result) == ssize_t(sizeof result);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  tessera::require(read_whole, "case", "ended early", "figures", "see what it said above");
  return result;
}

/// `tokens` of a document through `decoder` in a context of `cells`, then one step. `end_prompt()` is called behind the
/// prompt, `rows(context)` says what rows take.
template <class Decoder>
usage usage_of(const loaded_model& model, Decoder& decoder, int cells, int tokens, int threads,
               const std::function<void()>& end_prompt, const std::function<double(llama_context*)>& rows) {
  std::vector<llama_token> text = make_needle(model, tokens + 100, 0.5, 900).tokens;
  text.resize(std::size_t(tokens));
  malloc_trim(0);
  const double begin = private_bytes();
  const auto context = model.context(cells, threads, decoder);
  usage result;
  for (std::size_t done = 0; done + 1 < text.size();) {
    const std::size_t count = std::min<std::size_t>(512, text.size() - 1 - done);
    decode_text(decoder, context.get(), {text.begin() + long(done), text.begin() + long(done + count)});
    done += count;
    result.peak = std::max(result.peak, private_bytes() - begin);
  }
  end_prompt();
  decode_text(decoder, context.get(), {text.back()});
  result.resident = private_bytes() - begin;
  malloc_trim(0);
  result.trimmed = private_bytes() - begin;
  result.rows = rows(context.get());
  return result;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::fprintf(stderr, "usage: memory MODEL.gguf [--tokens N] [--method NAME] [--budget N] [--threads N]\n");
    return 2;
  }
  attention_options options{.budget = 256};
  int tokens = 7000, threads = 1;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string word = argv[i];
    const int value = std::atoi(argv[i + 1]);
    if (word == "--method") {
      options.method = argv[i + 1];
      continue;
    }
    tessera::require(word == "--tokens" || word == "--budget" || word == "--threads", "option", word,
                     "--tokens, --method, --budget or --threads", "see the head of memory.cpp");
    tessera::require(value >= 1, word, argv[i + 1], "at least 1", "pass another number");
    if (word == "--budget")
      options.budget = value;
    else
      (word == "--tokens" ? tokens : threads) = value;
  }
  options.threads = threads;
  constexpr int batch = 512;
  const std::string path = argv[1];
  const auto cells_of = [](llama_context* context) { return double(llama_state_seq_get_size(context, 0)); };
  const auto plain = [&](int cells, int length) {
    return apart([&] {
      const loaded_model model(path);
      plain_decoder decoder;
      return usage_of(model, decoder, cells, length, threads, [] {}, cells_of);
    });
  };
  const usage small = plain(batch, batch), whole = plain(tokens + 1, tokens),
              own = apart([&] {
                const loaded_model model(path);
                attention decoder(model.get(), options);
                return usage_of(
                    model, decoder, batch, tokens, threads, [&] { decoder.end_prompt(0); },
                    [&](llama_context*) { return double(decoder.bytes(0)); });
              });

  const double cell_bytes = small.rows / batch, others = small.resident - small.rows;  // buffers beside the cells
  const double alone = cell_bytes * (tokens + 1), mega = 1e6;
  std::printf("%d tokens, `%s` with %d; a token takes %.0f bytes in llama.cpp\n\n", tokens, options.method.c_str(),
              int(options.budget.value_or(0)), cell_bytes);
  std::printf(
      "| MB | resident | trimmed | peak | beside the cells | rows resident | rows by count |\n| --- | --- | --- | "
      "--- | --- | --- | --- |\n");
  const auto print = [&](const char* name, const usage& of, double counted) {
    std::printf("| %s | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n", name, of.resident / mega, of.trimmed / mega,
                of.peak / mega, others / mega, (of.resident - others) / mega, counted / mega);
  };
  print("llama.cpp, one batch", small, small.rows);
  print("llama.cpp, whole prompt", whole, whole.rows);
  print("Tessera's rows and llama.cpp's cells for one batch", own, own.rows + cell_bytes * batch);
  std::printf(
      "\nTessera's rows and the cells for one batch, resident behind the prompt: %.3f of llama.cpp's cells for the "
      "prompt (%.1f MB); trimmed %.3f; by count %.3f\n",
      (own.resident - others) / alone, alone / mega, (own.trimmed - others) / alone,
      (own.rows + cell_bytes * batch) / alone);
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
