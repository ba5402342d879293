// `tessera run` in a chat, as a program: its turns against whole conversations that the engine reads anew.
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/text/chat_template.hpp"
#include "engine/tokenizer.hpp"
#include "examples/naive_cache.hpp"
#include "examples/text/gguf_model.hpp"

using namespace engine_tests;

namespace {

constexpr const char* program =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

std::string ran(const std::string& command) {
  std::string all;
  std::FILE* const pipe = popen((std::string(TESSERA_TOOL) + " " + command).c_str(), "r");
  REQUIRE(pipe);
  for (char part[4096]; const std::size_t count = std::fread(part, 1, sizeof part, pipe);) all.append(part, count);
  CHECK(pclose(pipe) == 0);
  return all;
}

std::string said(const std::string& command) {
  std::string all;
  std::FILE* const pipe = popen((std::string(TESSERA_TOOL) + " " + command).c_str(), "r");
  REQUIRE(pipe);
  for (char part[4096]; const std::size_t count = std::fread(part, 1, sizeof part, pipe);) all.append(part, count);
  CHECK(pclose(pipe) != 0);
  return all;
}

}  // namespace

TEST_CASE("turns of a chat are the conversation as a whole, and its cache goes on") {
  const temporary_folder folder;
  const std::vector<std::string> marks{"<|im_end|>", "<|im_start|>"};
  folder.write("model.gguf", chat_model_bytes(marks, program));
  const auto path = folder / "model.gguf";
  executor workers(1);
  llama model = llama::load(path, workers);
  const auto words = engine::tokenizer::of_model(path);
  const engine::chat chat(engine::recognise_template(program), words, model.config().eos);
  const std::vector<std::string> messages{"Why?", "And <|im_end|>?", "So"};

  std::vector<token_t> tokens = chat.first_turn("Be kind", messages[0]), reply;
  std::vector<std::string> replies;
  for (std::size_t turn = 0; turn < messages.size(); ++turn) {
    if (turn > 0) {
      const std::vector<token_t> more = chat.next_turn(reply, messages[turn]);
      tokens.insert(tokens.end(), reply.begin(), reply.end() - 1);
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
    naive_cache cache(model.config());
    reply = model.generate(tokens, cache, at_most(5));
    replies.push_back(words.decode(reply));
  }

  const std::string base =
      "run --model " + path.string() + " --method full --dtype fp32 --threads 1 --max-new 5 --json";
  std::string lines, files;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    folder.write("turn" + std::to_string(i), messages[i]);
    files += " --prompt " + (folder / ("turn" + std::to_string(i))).string();
    lines += messages[i] + "\n\n";  // an empty line is no turn
  }
  folder.write("lines", lines);
  for (const std::string& source : {files, " < " + (folder / "lines").string()}) {
    const auto result = nlohmann::json::parse(ran(base + " --system 'Be kind'" + source));
    CHECK(result["template"] == "chatml");
    CHECK(result["turns"] == replies);
    CHECK(result["text"] == replies.back());
  }
  // The same turns, each in a process of its own.
  const std::string session = (folder / "session").string();
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string from = i == 0 ? " --system 'Be kind'" : " --load " + session;
    const auto result = nlohmann::json::parse(
        ran(base + from + " --save " + session + " --prompt " + (folder / ("turn" + std::to_string(i))).string()));
    CHECK(result["text"] == replies[i]);
  }
  CHECK(!std::filesystem::exists(session + ".part"));
  const std::string next = " --load " + session + " --prompt " + (folder / "turn0").string() + " 2>&1";
  folder.write("other.gguf", chat_model_bytes({"<|im_end|>", "<|im_start|>", "<|more|>"}, program));
  const auto refused = [&](std::string command, const std::string& from, const std::string& to) {
    return said(command.replace(command.find(from), from.size(), to) + next);
  };
  CHECK_THAT(refused(base, "model.gguf", "other.gguf"), contains("model of the saved conversation is another"));
  CHECK_THAT(refused(base, "--method full", "--method snapkv --budget 64"), contains("of a saved sequence is"));
  CHECK_THAT(refused(base, "--dtype fp32", "--dtype fp16"), contains("elements of a saved sequence is fp32"));
  folder.write("session", "TESSERA");
  CHECK_THAT(said(base + next), contains("saved sequence is cut short"));

  const auto plain = nlohmann::json::parse(ran(base + " --template none --prompt " + (folder / "turn0").string()));
  CHECK(!plain.contains("template"));
  CHECK(plain["prompt_tokens"] == 4);
}
