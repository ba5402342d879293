// tessera: what KV-cache compressors do to a model's answers, from the command line.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <new>
#include <tessera/core/error.hpp>

#include "commands.hpp"
#include "tasks.hpp"

namespace {

// Adds an option whose text the command itself parses, so that every error reads alike.
CLI::Option* add_text(CLI::App& command, const std::string& name, std::string& to, const std::string& about) {
  CLI::Option* option = command.add_option(name, to, about);
  if (!to.empty()) option->capture_default_str();
  return option;
}

void add_settings(CLI::App& command, std::vector<std::string>& to, const std::string& about) {
  command.add_option("--set", to, about)->type_name("NAME=VALUE")->allow_extra_args(false);
}

void add_method(CLI::App& command, tool::method_options& to) {
  add_text(command, "--method", to.method, "how to compress; `tessera list` shows all methods")->required();
  add_text(command, "--budget", to.budget, "tokens per KV head that may be kept, or read by one step");
  add_text(command, "--backend", to.backend, "where to compute: cpu or cuda");
  add_settings(command, to.settings, "a parameter of the method; may be given several times");
}

void add_model(CLI::App& command, std::string& model, std::string& dtype) {
  add_text(command, "--model", model, "folder with config.json, safetensors and tokenizer.model")->required();
  add_text(command, "--dtype", dtype, "what the cache stores: fp32 (CPU only), fp16 or bf16");
}

void add_threads(CLI::App& command, std::string& threads) {
  add_text(command, "--threads", threads, "worker threads; 0 takes every core");
}

// A line for each suite.
std::string suite_lines() {
  std::string all;
  for (const tool::suite& suite : tool::suites()) all += "  " + suite.name + ": " + suite.about + "\n";
  return all;
}

void add_list(CLI::App& app) {
  auto given = std::make_shared<tool::list_options>();
  CLI::App* command = app.add_subcommand("list",
                                         "Shows the methods with their papers, policies, parameters and defaults,\n"
                                         "and the backends of this build.");
  command->add_flag("--json", given->as_json, "print JSON");
  command->footer("Example:\n  tessera list");
  command->callback([given] { tool::list_methods(*given); });
}

void add_run(CLI::App& app) {
  auto given = std::make_shared<tool::run_options>();
  CLI::App* command = app.add_subcommand(
      "run",
      "Lets a model read a prompt and continue it with a compressed cache, always by the likeliest token,\n"
      "and says what the cache held and read.");
  add_model(*command, given->model, given->dtype);
  add_text(*command, "--prompt", given->prompt, "text file with the prompt")->required();
  add_method(*command, given->method);
  add_text(*command, "--max-new", given->max_new,
           "tokens to write at most; also the method's max_new, where it has one and --set gives no other");
  command->add_flag("--one-line", given->one_line, "stop at the end of the first line");
  add_threads(*command, given->threads);
  command->add_flag("--json", given->as_json, "print JSON");
  command->footer(
      "Example:\n  tessera run --model examples/model --prompt letter.txt --method snapkv --budget 256 --one-line");
  command->callback([given] { tool::run_prompt(*given); });
}

void add_eval(CLI::App& app) {
  auto given = std::make_shared<tool::eval_options>();
  given->text = TESSERA_DATA_DIR "/opticks.txt";
  given->tasks = TESSERA_DATA_DIR "/tasks.json";
  CLI::App* command = app.add_subcommand(
      "eval",
      "Asks a model questions about long documents under many methods and budgets, and counts the right answers.\n"
      "Makes its own documents and questions, the same for every method, or takes yours.");
  add_model(*command, given->model, given->dtype);
  add_text(*command, "--methods", given->methods, "methods, separated by commas")->required();
  add_text(*command, "--budgets", given->budgets, "tokens per KV head, separated by commas");
  add_settings(*command, given->settings, "a parameter, for every method that has it; may be given several times");
  add_text(*command, "--context", given->context, "tokens of a document");
  CLI::Option* suite = add_text(*command, "--suite", given->suite, "group of task families, listed below");
  add_text(*command, "--families", given->families, "task families, separated by commas, in place of a suite")
      ->excludes(suite);
  add_text(*command, "--count", given->count, "documents of each family");
  add_text(*command, "--seed", given->seed, "another seed makes other documents");
  add_text(*command, "--questions", given->questions, "your own questions instead, JSON Lines")->excludes(suite);
  add_text(*command, "--json", given->json, "also write the result as JSON to this file");
  add_text(*command, "--text", given->text, "text that documents are cut from");
  add_text(*command, "--tasks", given->tasks, "word lists, templates and families");
  add_text(*command, "--backend", given->backend, "where to compute: cpu or cuda");
  add_threads(*command, given->threads);
  command->footer(
      "Suites:\n" + suite_lines() +
      "\nA line of --questions is {\"family\": \"...\", \"turns\": [{\"prompt\": \"...\", \"answer\": \"...\"}, ...]}. "
      "A\n"
      "turn is right when what the model writes begins with its answer. Methods without a budget ignore --budgets.\n"
      "Methods that have the parameter max_new get the most tokens that an answer may have here, unless --set gives "
      "another.\n\n"
      "Example:\n  tessera eval --model examples/model --methods full,snapkv,streaming_llm --budgets 128,256 "
      "--families single,conversation");
  command->callback([given] { tool::evaluate(*given); });
}

void add_compress(CLI::App& app) {
  auto given = std::make_shared<tool::compress_file_options>();
  CLI::App* command = app.add_subcommand(
      "compress",
      "Compresses one layer's keys and values that you dumped from any engine, runs its decode steps,\n"
      "and writes what was kept, what each step read and what came out.");
  add_method(*command, given->method);
  add_text(*command, "--in", given->in, "safetensors file with k, v, q and perhaps q_decode, k_decode, v_decode")
      ->required();
  add_text(*command, "--out", given->out, "safetensors file to write")->required();
  add_threads(*command, given->threads);
  command->footer(
      "Input: k, v [kv_heads, tokens, head_dim] in F32, F16 or BF16, keys after RoPE; q [n_q, q_heads, head_dim], the\n"
      "queries of the last n_q prompt tokens; optional boundaries [tokens] U8; optional q_decode [steps, q_heads,\n"
      "head_dim], k_decode, v_decode [steps, kv_heads, head_dim].\n"
      "Output: keep.indptr, keep.indices, attend.indptr, attend.indices, out, lse; sizes and parameters as "
      "metadata.\n\n"
      "Example:\n  tessera compress --method snapkv --budget 256 --set window=16 --in layer7.safetensors "
      "--out kept.safetensors");
  command->callback([given] { tool::compress_file(*given); });
}

}  // namespace

int main(int count, char** arguments) {
  constexpr int bad_input = 2;
  CLI::App app{
      "Runs a language model, or one layer's tensors, with a compressed KV cache.\n"
      "Start with `tessera list`; every command explains itself with --help.",
      "tessera"};
  app.require_subcommand(1);
  add_list(app);
  add_run(app);
  add_eval(app);
  add_compress(app);
  try {
    app.parse(count, arguments);
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& problem) {
    std::fprintf(stderr, "tessera: %s; see tessera --help, or --help behind a command\n", problem.what());
  } catch (const tessera::error& problem) {
    std::fprintf(stderr, "tessera: %s\n", problem.what());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "tessera: not enough memory; shorten the prompt or name fewer methods\n");
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "tessera: internal error: %s\n", problem.what());
    return 1;
  }
  return bad_input;
}
