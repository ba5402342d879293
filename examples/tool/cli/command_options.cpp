#include "command_options.hpp"

#include <memory>

#include "tool/commands.hpp"
#include "tool/eval/report.hpp"
#include "tool/eval/tasks.hpp"
#include "tool/methods/values.hpp"

namespace {

// Adds an option whose text the command itself parses, so that every error reads alike. `kind` says in the help what it
// is, a number with its range.
CLI::Option* add_text(CLI::App& command, const std::string& name, const std::string& kind, std::string& to,
                      const std::string& about) {
  CLI::Option* option = command.add_option(name, to, about)->type_name(kind);
  if (!to.empty()) option->capture_default_str();
  option->check([](const std::string& text) { return text.empty() ? "empty; expected a value" : std::string(); }, "",
                "");
  return option;
}

void add_settings(CLI::App& command, std::vector<std::string>& to, const std::string& about) {
  command.add_option("--set", to, about)->type_name("NAME=VALUE")->allow_extra_args(false);
}

void add_method(CLI::App& command, tool::method_options& to) {
  add_text(command, "--method", "NAME", to.method, "how to compress; `tessera list` shows all methods")->required();
  add_text(command, "--budget", "NUMBER", to.budget,
           "tokens per KV head that may be kept, or read by one step; `tessera list` shows each method's range");
  add_text(command, "--backend", "cpu|cuda", to.backend, "where to compute: cpu or cuda");
  add_settings(command, to.settings, "a parameter of the method; may be given several times");
}

void add_model(CLI::App& command, std::string& model, std::string& dtype) {
  add_text(command, "--model", "FOLDER", model, "folder with config.json, safetensors and a tokenizer; or a .gguf file")
      ->required();
  add_text(command, "--dtype", "fp32|fp16|bf16", dtype, "what the cache stores: fp32 (CPU only), fp16 or bf16");
}

void add_threads(CLI::App& command, std::string& threads) {
  add_text(command, "--threads", "0..1024", threads, "worker threads; 0 takes every core");
}

// The options that choose methods with their budgets and parameters.
void add_variants(CLI::App& command, tool::eval_options& given, const std::string& about) {
  add_text(command, "--methods", "NAME,...", given.methods, about)->required();
  add_text(command, "--budgets", "NUMBER,...", given.budgets,
           "tokens per KV head, separated by commas; `tessera list` shows each method's range");
  add_settings(command, given.settings,
               "a parameter, for every method that has it, or METHOD.NAME=VALUE for one; may be given several times");
  command
      .add_option("--vary", given.varied,
                  "more rows with each of these values of a parameter, beside those without; NAME as for --set; may be "
                  "given several times, one parameter after the other")
      ->type_name("NAME=VALUE,...")
      ->allow_extra_args(false);
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
      "and says what the cache held and read. A model with a chat template answers as in a chat.");
  add_model(*command, given->model, given->dtype);
  command
      ->add_option("--prompt", given->prompts,
                   "text file with the prompt; - is standard input; in a chat it may be given several times, a turn "
                   "each; without it each line of standard input is a turn")
      ->type_name("FILE")
      ->allow_extra_args(false);
  add_text(*command, "--template", "auto|none|chatml|llama3", given->chat_template,
           "how turns are written: as the model says, not at all, or in one of two ways");
  command->add_option("--system", given->system_prompt, "the system's prompt in a chat, in place of the template's own")
      ->type_name("TEXT");
  add_method(*command, given->method);
  add_text(*command, "--max-new", "1..16777216", given->max_new,
           "tokens to write at most; also the method's max_new, where it has one and --set gives no other");
  command->add_option("--load", given->load, "FILE: a conversation that --save wrote, which goes on");
  command->add_option("--save", given->save, "FILE: where the conversation is saved when it ends");
  command->add_flag("--one-line", given->one_line, "stop at the end of the first line");
  add_threads(*command, given->threads);
  command->add_flag("--json", given->as_json, "print JSON");
  command->footer(
      "Example:\n  tessera run --model examples/model --prompt letter.txt --method snapkv --budget 256 --one-line\n"
      "  tessera run --model SmolLM2-135M-Instruct.Q4_1.gguf --method snapkv --budget 256");
  command->callback([given] { tool::run_prompt(*given); });
}

// The options that choose what is asked.
void add_documents(CLI::App& command, tool::eval_options& given) {
  given.text = TESSERA_DATA_DIR "/opticks.txt";
  given.tasks = TESSERA_DATA_DIR "/tasks.json";
  CLI::Option* context = add_text(command, "--context", "1..16777216", given.context, "tokens of a document");
  CLI::Option* suite = add_text(command, "--suite", "NAME", given.suite, "group of task families, listed below");
  CLI::Option* turns = add_text(command, "--turns", "1..9", given.turns,
                                "turns of a conversation of suite conversations, which share --context; 3 if left out");
  CLI::Option* families = add_text(command, "--families", "NAME,...", given.families,
                                   "task families, separated by commas, in place of a suite")
                              ->excludes(suite);
  CLI::Option* count = add_text(command, "--count", "1..1000000", given.count, "documents of each family");
  CLI::Option* several = add_text(command, "--questions-per-document", "1..100", given.questions_per_document,
                                  "each asked by itself; of a suite those families that leave something to ask for");
  CLI::Option* seed = add_text(command, "--seed", "0..2^63-1", given.seed, "another seed makes other documents");
  CLI::Option* text = add_text(command, "--text", "FILE", given.text, "text that documents are cut from");
  CLI::Option* tasks = add_text(command, "--tasks", "FILE", given.tasks, "word lists, templates and families");
  CLI::Option* questions = add_text(command, "--questions", "FILE", given.questions,
                                    "your own questions instead, JSON Lines; - is standard input");
  add_text(command, "--question-template", "TEXT", given.how_to_ask,
           "how LongBench's and SCBench's questions become prompts, \\n for a line break")
      ->needs(questions)
      ->default_str("'{context}\\n\\n{input}\\nAnswer:'");
  command.add_flag("--separately", given.separately, "ask every question of SCBench's lines by itself")
      ->needs(questions);
  for (CLI::Option* unused : {suite, families, turns, context, count, several, seed, text, tasks})
    questions->excludes(unused);
}

void add_agree(CLI::App& app) {
  auto given = std::make_shared<tool::agree_options>();
  given->text = TESSERA_DATA_DIR "/opticks.txt";
  CLI::App* command = app.add_subcommand(
      "agree",
      "Gives a model the same text with compressed caches and with the full one, token by token, and says how far\n"
      "the predictions of the next token are apart.");
  add_model(*command, given->model, given->dtype);
  add_variants(*command, *given, "methods, separated by commas; full is always there");
  CLI::Option* text =
      add_text(*command, "--text", "FILE", given->text, "text that the pieces are cut from; - is standard input");
  add_text(*command, "--prompts", "FILE", given->prompts,
           "your own texts or prompts instead, JSON Lines; - is standard input")
      ->excludes(text)
      ->excludes(add_text(*command, "--count", "1..1000000", given->count,
                          "pieces of each length, at even distances over the text"));
  add_text(*command, "--prompt", "2..16777216,...", given->prompt,
           "tokens of a piece that are its prompt; several lengths, separated by commas, each get rows of their own")
      ->default_str(tool::agree_options::usual_prompt);
  add_text(*command, "--steps", "1..16777216", given->steps, "tokens behind it, which are predicted and then given");
  add_text(*command, "--backend", "cpu|cuda", given->backend, "where to compute: cpu or cuda");
  add_threads(*command, given->threads);
  add_text(*command, "--json", "FILE", given->json, "write the result as JSON, too");
  command->footer(
      "A line of --prompts is {\"text\": \"...\"}, from whose beginning a piece of each length is cut, or\n"
      "{\"prompt\": \"...\", \"continuation\": \"...\"}, in the row of the next power of two.\n"
      "benchmarks/plots/plot_agree.py draws the JSON.\n\n"
      "Example:\n  tessera agree --model examples/model --methods snapkv,rocketkv --budgets 128,256 --prompt 512,1024");
  command->callback([given] { tool::agree(*given); });
}

void add_eval(CLI::App& app) {
  auto given = std::make_shared<tool::eval_options>();
  CLI::App* command = app.add_subcommand(
      "eval",
      "Asks a model questions about long documents under many methods and budgets, and counts the right answers.\n"
      "Makes its own documents and questions, the same for every method, or takes yours.");
  add_model(*command, given->model, given->dtype);
  add_variants(*command, *given, "methods, separated by commas");
  add_documents(*command, *given);
  add_text(*command, "--chunk", "1..16777216|whole", given->chunk,
           "tokens of a prompt that a cache gets at a time, or whole: all of them");
  add_text(*command, "--prefix-cache", "on|off", given->prefix_cache,
           "whether what questions about one document begin with is read once; answers are the same");
  add_text(*command, "--metric", "NAME", given->metric, "scores answers: " + tool::joined(tool::metric_names()));
  command->add_flag("--normalise", given->normalise, "first takes out capitals, punctuation and articles (f1 always)");
  add_text(*command, "--json", "FILE", given->json, "also write the result as JSON to this file");
  add_text(*command, "--backend", "cpu|cuda", given->backend, "where to compute: cpu or cuda");
  add_threads(*command, given->threads);
  command->footer(
      "Suites:\n" + suite_lines() +
      "\nA line of --questions is {\"family\": \"...\", \"turns\": [{\"prompt\": \"...\", \"answer\": \"...\"}, ...]}, "
      "or of\nLongBench's, RULER's or SCBench's files. By prefix a turn is right when the text begins with its "
      "answer,\n"
      "as 123 begins with 12; by strict no letter or digit may follow. Methods without a budget ignore --budgets.\n"
      "Methods that have the parameter max_new get the most tokens that an answer may have here, unless --set gives "
      "another.\n\n"
      "Example:\n  tessera eval --model examples/model --methods full,snapkv,streaming_llm --budgets 128,256 "
      "--families single,conversation");
  command->callback([given] { tool::evaluate(*given); });
}

// The options that say which prompts a model is measured on.
void add_prompts(CLI::App& command, tool::document_options& given) {
  add_text(command, "--context", "1..16777216", given.context, "tokens of a prompt");
  CLI::Option* suite = add_text(command, "--suite", "NAME", given.suite, "which task families; see below");
  add_text(command, "--families", "NAME,..", given.families, "task families, separated by commas, in place of a suite")
      ->excludes(suite);
  add_text(command, "--seed", "0..2^63-1", given.seed, "another seed makes other prompts");
  given.text = TESSERA_DATA_DIR "/opticks.txt";
  given.tasks = TESSERA_DATA_DIR "/tasks.json";
  add_text(command, "--text", "FILE", given.text, "text that prompts are cut from");
  add_text(command, "--tasks", "FILE", given.tasks, "word lists, templates and families");
}

void add_calibrate(CLI::App& app) {
  auto given = std::make_shared<tool::calibrate_options>();
  CLI::App* command = app.add_subcommand(
      "calibrate",
      "Measures over many prompts what each head keeps where a layer keeps its best tokens, whichever head\n"
      "they belong to, and writes a profile by which tangram gives every head a share of its own.");
  add_text(*command, "--model", "FOLDER", given->model,
           "folder with config.json, safetensors and a tokenizer; or a .gguf file")
      ->required();
  add_text(*command, "--method", "NAME", given->method, "a method that ranks the prompt's tokens");
  add_text(*command, "--share", "1e-6..1", given->share, "of its tokens that a layer keeps");
  add_text(*command, "--samples", "1..1000000", given->samples, "prompts, from all families in turn");
  add_text(*command, "--out", "FILE", given->out, "profile to write, JSON")->required();
  add_text(*command, "--alpha", "0..1e6", given->alpha, "deviations above its mean that a head gets");
  command->add_flag("--renormalise", given->renormalise, "scale the budgets so that they are --share on average");
  add_settings(*command, given->settings, "a parameter of the method; may be given several times");
  add_prompts(*command, *given);
  add_threads(*command, given->threads);
  command->footer("Suites:\n" + suite_lines() +
                  "\nbenchmarks/plots/plot_profile.py draws a profile.\n\n"
                  "Example:\n  tessera calibrate --model examples/model --method snapkv --share 0.3 --samples 50 "
                  "--out profile.json");
  command->callback([given] { tool::calibrate(*given); });
}

void add_compress(CLI::App& app) {
  auto given = std::make_shared<tool::compress_file_options>();
  CLI::App* command = app.add_subcommand(
      "compress",
      "Compresses one layer's keys and values that you dumped from any engine, runs its decode steps,\n"
      "and writes what was kept, what each step read and what came out.");
  add_method(*command, given->method);
  add_text(*command, "--in", "FILE", given->in,
           "safetensors file with k, v, q and perhaps q_decode, k_decode, v_decode")
      ->required();
  add_text(*command, "--out", "FILE", given->out, "safetensors file to write")->required();
  command->add_flag("--scores", given->scores, "also write the scores by which tokens were kept");
  add_threads(*command, given->threads);
  command->footer(
      "Input: k, v [kv_heads, tokens, head_dim] in F32, F16 or BF16, keys after RoPE; q [n_q, q_heads, head_dim], the\n"
      "queries of the last n_q prompt tokens; optional turns [t] I64, the first row of each turn; optional boundaries\n"
      "[tokens] U8, 1 where a segment of the text ends (sablock and sentencekv need them; sentencekv "
      "boundaries_decode\n"
      "[steps] too); optional output_projection [q_heads,\n"
      "head_dim, hidden], what values become behind attention (criticalkv); optional scores [kv_heads, tokens], what "
      "a\n"
      "gate gives each token (fastkvzip needs them); optional q_decode [steps, q_heads,\n"
      "head_dim], k_decode, v_decode [steps, kv_heads, head_dim]. expected_attention needs --set rope_theta=NUMBER.\n"
      "Output: keep.indptr, keep.indices, attend.indptr, attend.indices, out, lse; sizes and parameters as metadata;\n"
      "with --scores also scores.indptr, scores.positions, scores.values: the tokens that competed when the last\n"
      "prompt ended (a window that stays in any case does not), with the scores that the method chose by. sablock "
      "also\n"
      "writes segments.block_size: by segment of the tokens before the window, in blocks of what size it was kept, 0: "
      "not.\n\n"
      "Example:\n  tessera compress --method snapkv --budget 256 --set window=16 --in layer7.safetensors "
      "--out kept.safetensors");
  command->callback([given] { tool::compress_file(*given); });
}

void add_heads(CLI::App& app) {
  auto given = std::make_shared<tool::heads_options>();
  CLI::App* command = app.add_subcommand(
      "heads",
      "Finds out which KV heads of a model look far back while it answers questions about long documents, and\n"
      "writes a profile of them for duo_attention.");
  add_text(*command, "--model", "FOLDER", given->documents.model,
           "folder with config.json, safetensors and a tokenizer; or a .gguf file")
      ->required();
  add_documents(*command, given->documents);
  add_text(*command, "--sinks", "0..16777216", given->sinks, "first tokens that a streaming head keeps");
  add_text(*command, "--recent", "1..16777216", given->recent, "newest tokens that it keeps");
  add_text(*command, "--out", "FILE", given->out, "profile to write")->required();
  add_threads(*command, given->documents.threads);
  command->footer(
      "The number of a head is the part of its attention that lies behind the first and before the newest tokens, on\n"
      "average over the rows that answer.\n\n"
      "Example:\n  tessera heads --model examples/model --count 4 --out heads.json\n"
      "  tessera eval --model examples/model --methods duo_attention --budgets 256 --set profile=heads.json");
  command->callback([given] { tool::find_heads(*given); });
}

void add_strategies(CLI::App& app) {
  auto given = std::make_shared<tool::strategies_options>();
  CLI::App* command = app.add_subcommand(
      "strategies",
      "Measures over many prompts what each packing strategy of mosaickv loses, and says by which limits\n"
      "strategy=searched chooses the wanted one.");
  add_text(*command, "--model", "FOLDER", given->model,
           "folder with config.json, safetensors and a tokenizer; or a .gguf file")
      ->required();
  add_text(*command, "--channels", "0.125|0.25|0.375", given->channels, "share of the channels that is wanted");
  add_text(*command, "--group", "1|2|4", given->group, "channels of a group that is wanted");
  add_text(*command, "--block", "4|8|16", given->block, "tokens of a block that is wanted");
  add_text(*command, "--samples", "1..1000000", given->samples, "prompts, from all families in turn");
  add_prompts(*command, *given);
  add_threads(*command, given->threads);
  command->footer("Each layer of a prompt is a segment.\n\nSuites:\n" + suite_lines() +
                  "\nExample:\n  tessera strategies --model examples/model --samples 10\n"
                  "  tessera eval --model examples/model --methods mosaickv --budgets 256 --set strategy=searched "
                  "--set channel_loss=NUMBER");
  command->callback([given] { tool::find_strategy_limits(*given); });
}

}  // namespace

void tool::add_commands(CLI::App& app) {
  add_list(app);
  add_run(app);
  add_eval(app);
  add_agree(app);
  add_compress(app);
  add_calibrate(app);
  add_heads(app);
  add_strategies(app);
}
